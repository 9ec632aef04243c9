"""Decoding on a GPU: backend.py · decoder.py (rows of one trajectory) · speculate.py · kernels.py · quantise.py."""
