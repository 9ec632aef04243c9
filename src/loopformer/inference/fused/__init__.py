"""Decoding on a GPU: shared.py (the engine's backend) · batch.py (passes that rows share) · kernels.py ·
graphs.py (prompts, a row that runs alone) · backend.py (what needs no Triton)."""
