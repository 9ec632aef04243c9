"""How good a model is at each budget: subject.py (the model) · store.py (finished pieces are kept) · text.py,
windows.py, walk.py, perplexity.py (perplexity) · schedules.py, best.py, schedule_figure.py (the best schedule)."""
