"""From a model to text: sampling.py · text.py (streaming) · generate.py · speculative.py · score.py ·
budget.py (targets) · layout.py (memory order)."""
