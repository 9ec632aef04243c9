"""What a model's states do from loop to loop: metrics.py, similarity.py (CKA), lens.py (what is measured) ·
prompts.py (on which text) · dynamics.py (one model along one trajectory) · results.py, figures.py (what is written)
· names.py · report (everything about several models in one folder).
"""
