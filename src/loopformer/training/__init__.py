"""Training: launch.py starts or resumes a run, and trainer.py is the loop.

plan.py says what each step trains on and what a run takes · packing.py packs a micro-batch into one pass ·
objective.py is its loss · steps.py and graphs.py run a step, eagerly or as CUDA graphs · optimizer.py ·
distributed.py · checkpoint.py · reporting.py · fused/ runs a loop of the model on a GPU.
"""
