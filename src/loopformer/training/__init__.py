"""Training: launch.py starts or resumes a run, and trainer.py is the loop.

plan.py says what each step trains on and what a run takes · objective.py is the loss · optimizer.py ·
distributed.py · checkpoint.py · reporting.py · fused/ runs a loop of the model on a GPU.
"""
