"""How good a model is at each budget: text.py (perplexity) · schedules.py (the best schedule) · tasks.py (zero-shot
tasks, with ../lm_eval.py) · states.py (state tracking) · stories.py (questions about stories) · early_exit.py ·
store.py (stored results) · loaded.py (the model under evaluation).
"""
