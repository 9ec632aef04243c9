"""passes.py (a loop and its backward) · ops.py (its operations, in PyTorch) · kernels.py (in Triton)."""
