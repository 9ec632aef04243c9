"""How fast a model is on this machine: machine.py (the machine, rows) · decode.py (time per token) ·
engine.py (requests at mixed budgets and at random times) · train.py."""
