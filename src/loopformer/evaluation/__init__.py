"""How good a model is at each budget: text.py (perplexity) · schedules.py (the best schedule) · tasks.py,
harness.py, benchmarks.py (zero-shot) · states.py (state tracking) · store.py (finished pieces).
"""
