"""Running a model: request.py (a request, its text, its result) · sampling.py · engine.py (the one decode loop) ·
decode.py (KV slots, plain backend) · fused/ (the backend on a GPU) · budget.py (targets) · batch_file.py
(prompts.jsonl → answers.jsonl) · chat.py (messages → prompt)."""
