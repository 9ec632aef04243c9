"""What was measured, and how it is shown: metrics.py (of token states) · dynamics.py (one model, one trajectory) ·
results.py (stored numbers as dataclasses) · figures.py (what is drawn of them) · report/ (models side by side).
"""
