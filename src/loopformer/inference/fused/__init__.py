"""Decoding on a GPU: runner.py (runs ahead of the host) · launch.py (slots, pages, launches) · prefill.py (prompts)
· single_row.py (a sequence that runs alone) · streams.py (the streams and their waits) · kernels.py ·
batch_pool.py (batches that are used again)."""
