"""launch.py starts or continues a run: trainer.py (the loop) over batches.py, objective.py and head_loss.py, with
optimizer.py, distributed.py, validation.py, checkpoint.py and reporting.py; plan.py estimates a run; fused/ runs a
pass on a GPU."""
