"""passes.py (a pass and its backward) · ops.py (its operations, in PyTorch) · kernels.py (in Triton) · types.py."""
