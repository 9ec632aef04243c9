"""Decoding on a GPU: kernels.py (Triton) · decoder.py (a batch along one trajectory) · backend.py · quantise.py."""
