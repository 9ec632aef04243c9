"""How good a model is at each budget: store.py (finished pieces are kept)."""
