#!/usr/bin/env bash
# A walk through everything, with models so small that it takes about a minute on two CPU cores:
#
#   pip install -c constraints.txt '.[plot,serve,hf]'
#   bash examples/first_hour.sh [TEXT...]           # your .txt, .md or .jsonl files; without them these documents
#   PROMPT='Once upon' bash examples/first_hour.sh tales/*.txt
#
# What it makes is in first-hour/: data, runs, pictures, a report, an export. The model of the text has learned a few
# words and their order. With more steps (STEPS=3000, some five minutes) it writes in the manner of the text.
# The model of the last section has learned a task that needs depth, so its budgets differ.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
texts=("$@")
[ $# -gt 0 ] || texts=("$here"/README.md "$here"/docs)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # matrices this small are slower on more threads
show() { printf '\n\033[1m$ %s\033[0m\n' "$1" >&2; }
say() {  # show the command with quotes only where it needs them, and run it
  local words=(loopformer) word
  for word in "$@"; do
    [[ $word =~ ^[[:alnum:]_./,:=@%+-]+$ ]] && words+=("$word") || words+=("'$word'")
  done
  show "${words[*]}"
  loopformer "$@"
}
mkdir -p first-hour
prompt=${PROMPT:-The model}
sampling=(--temperature 0.8 --top-p 0.95 --seed 0)

# From text to tokens to a model that serves every budget.
say prepare "${texts[@]}" --out first-hour/data --train-tokenizer 512 --val-fraction 0.05
# In so few steps later loops only learn to add something if the full trajectory learns alone for longer than usual.
budgets='[{budget: full, active_range: [0, 0.5]}, {budget: full, rows: 0.5, active_range: [0.5, 1]},'
budgets+=' {budget: [2, 3], rows: 0.25, weight: 0.3, active_range: [0.5, 1]},'
budgets+=' {budget: 1, rows: 0.25, weight: 0.3, active_range: [0.5, 1]}]'
training=(demo data.path=first-hour/data training.steps="${STEPS:-240}" training.batch=8 training.learning_rate=6.0e-3
  training.warmup=20 training.save_every=120 training.validate_every=120 training.log_every=60
  training.matrix_learning_rate=0.05 objective.trajectories="$budgets"
  model.width=64 model.ffn=160 model.context=64 --out first-hour/run)
say train "${training[@]}" --dry-run
say train "${training[@]}"
say verify first-hour/data first-hour/run

# Text, at the compute of your choice.
say generate "$prompt" --model first-hour/run --budget 2 --max-tokens 40 "${sampling[@]}"
say generate "$prompt" --model first-hour/run --compare 1,4,2-1-1 --max-tokens 24 "${sampling[@]}"
printf '%s\n/budget 1\nGo on\n' "$prompt" | say chat --model first-hour/run --max-tokens 16 "${sampling[@]}"

# How good is it, at which schedule, and what happens inside?
say eval text first-hour/run --budgets 1,2,4 --max-tokens 2000
say search --model first-hour/run --budget 2 --max-tokens 2000
say analyze --model first-hour/run --prompts 4 --length 32 --out first-hour/analysis
say report first-hour/run --max-tokens 2000 --prompts 4 --out first-hour/report

# Out into the world: Transformers, and a server that speaks OpenAI's API.
say export first-hour/run first-hour/exported
show "loopformer serve first-hour/run --port 0"
: > first-hour/server.txt  # for grep, before the server has written
loopformer serve first-hour/run --port 0 > first-hour/server.txt 2> first-hour/server.log &  # `say` would be a shell
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
until grep -qo 'http://[0-9.:]*' first-hour/server.txt; do
  kill -0 "$server" || { cat first-hour/server.log >&2; exit 1; }
  sleep 0.2
done
address=$(grep -o 'http://[0-9.:]*' first-hour/server.txt | head -n 1)
until curl --silent --fail "$address/ready" > /dev/null; do sleep 0.2; done
body="{\"prompt\": \"$prompt\", \"budget\": 2, \"max_tokens\": 24, \"temperature\": 0.8, \"seed\": 0}"
show "curl $address/v1/completions -H 'Content-Type: application/json' -d '$body'"
curl --silent --fail "$address/v1/completions" -H 'Content-Type: application/json' -d "$body"
kill "$server"
wait "$server" || true
trap - EXIT
printf '\n'

# A task that needs depth: multiply eight permutations. One loop gets the first two right, four loops twice as many.
say train states model.context=9 model.loops=4 model.width=32 model.heads=2 model.ffn=80 training.steps=800 \
  training.batch=32 training.learning_rate=4.0e-3 training.warmup=50 training.validate_every=800 \
  training.save_every=800 training.log_every=200 --out first-hour/permutations
say eval states first-hour/permutations --sequences 2048 --certainty 0.9 --figure first-hour/permutations.png

printf '\nDone. The table above has the accuracy by budget (rows) and position (columns). Now look at:\n' >&2
printf '  %s\n' first-hour/permutations.png first-hour/run/curves.png first-hour/report/report.html \
  first-hour/analysis/representations.png >&2
