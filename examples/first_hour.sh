#!/usr/bin/env bash
# A walk through everything, with a model so small that it takes about a minute on one CPU core:
#
#   pip install -c constraints.txt '.[plot,serve,hf]'
#   bash examples/first_hour.sh [TEXT...]           # your .txt, .md or .jsonl files; without them these documents
#   PROMPT='Once upon' bash examples/first_hour.sh tales/*.txt
#
# What it makes is in first-hour/: data, runs, pictures, a report, an export. Such a model has learned a few words and
# their order; with more steps (STEPS=1500, some ten minutes) it writes in the manner of the text.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
texts=("$@")
[ $# -gt 0 ] || texts=("$here"/README.md "$here"/docs/*.md)
show() { printf '\n\033[1m$ loopformer %s\033[0m\n' "$*" >&2; }
say() { show "$@"; loopformer "$@"; }
mkdir -p first-hour
prompt=${PROMPT:-The}

# From text to tokens to a model that serves every budget.
say prepare "${texts[@]}" --out first-hour/data --train-tokenizer 512
say train demo data.path=first-hour/data --dry-run
say train demo data.path=first-hour/data training.steps="${STEPS:-40}" training.save_every=20 \
  training.validate_every=20 training.warmup=10 training.log_every=20 model.width=64 model.ffn=160 model.context=64 \
  --out first-hour/run
say verify first-hour/data first-hour/run

# Text, at the compute of your choice.
say generate "$prompt" --model first-hour/run --budget 2 --max-tokens 24
say generate "$prompt" --model first-hour/run --compare 1,4,2-1-1 --max-tokens 8
printf '%s\n/budget 1\nGo on\n' "$prompt" | say chat --model first-hour/run --max-tokens 8

# How good is it, at which schedule, and what happens inside?
say eval text first-hour/run --budgets 1,2,4 --max-tokens 2000
say search --model first-hour/run --budget 2 --max-tokens 2000
say analyze --model first-hour/run --prompts 4 --length 32 --out first-hour/analysis
say report first-hour/run --max-tokens 2000 --prompts 4 --out first-hour/report

# Out into the world: Transformers, and a server that speaks OpenAI's API.
say export first-hour/run first-hour/exported
show serve first-hour/run --port 0
loopformer serve first-hour/run --port 0 > first-hour/server.txt 2> first-hour/server.log &  # `say` would be a shell
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
until grep -qo 'http://[0-9.:]*' first-hour/server.txt; do
  kill -0 "$server" || { cat first-hour/server.log >&2; exit 1; }
  sleep 0.2
done
address=$(grep -o 'http://[0-9.:]*' first-hour/server.txt | head -n 1)
until curl --silent --fail "$address/ready" > /dev/null; do sleep 0.2; done
curl --silent --fail "$address/v1/completions" -H 'Content-Type: application/json' \
  -d "{\"prompt\": \"$prompt\", \"budget\": 2, \"max_tokens\": 8}"
kill "$server"
wait "$server" || true
trap - EXIT
printf '\n\nDone. Look at first-hour/report/report.html, and at first-hour/analysis.\n' >&2
