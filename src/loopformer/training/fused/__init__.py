"""passes.py (a pass and its backward) · ops.py (what it computes, in PyTorch) · kernels.py (in Triton) · types.py."""
