"""Generation: request.py (requests, events, results) · sequence.py (one completion with its status) · scheduler.py
(which sequences to prefill, and in which order) · engine.py (submit, step, cancel) · runner.py (prefill and decode
on any device) · fused/ (the same on a GPU) · kv_cache.py (pages, shared prompts, slots) · sampling.py (the next
token) · detokenizer.py (text, stop strings) · budget.py (targets) · batch_file.py (prompts.jsonl → answers.jsonl) ·
chat.py (messages → prompt)."""
