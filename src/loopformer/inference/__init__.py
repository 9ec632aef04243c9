"""From a model to text: sampling.py · text.py (streaming) · generate.py · score.py · budget.py (targets)."""
