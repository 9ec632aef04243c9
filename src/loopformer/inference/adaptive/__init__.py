"""Depth by certainty, on trial: policy.py (when to go deeper) · ladder.py (trajectories that share first steps)."""
