"""How fast a model is here: machine.py (the machine, the report) · decode.py (time per token) ·
engine.py (requests at mixed budgets and at random times) · train.py."""
