"""From a model to text: sampling.py · text.py (streaming) · generate.py · speculative.py · score.py ·
adaptive.py, ladder.py, certainty.py, tally.py (depth by certainty) · budget.py (targets) ·
layout.py (memory order)."""
