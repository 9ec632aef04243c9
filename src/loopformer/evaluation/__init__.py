"""How good a model is at each budget: text.py (perplexity) · schedules.py (the best schedule) · tasks.py (zero-shot
tasks, with ../lm_eval.py) · states.py (state tracking) · store.py (the model, its stored results and schedules).
"""
