"""Running a model: request.py (a request, its text, its result) · sampling.py · decode.py (KV slots, plain backend)
· engine.py (the one decode loop) · draft.py · score.py (the one scorer) · budget.py (targets) ·
batch_file.py (prompts.jsonl → answers.jsonl) · chat.py (turns → prompt) · fused/ (on a GPU)."""
