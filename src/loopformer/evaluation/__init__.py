"""How good a model is at each budget: text.py (perplexity) · schedules.py (the best schedule) · tasks.py,
harness.py, benchmarks.py (zero-shot) · store.py (finished pieces) · calibrate.py, simulate.py (depth by certainty).
"""
