"""How fast a model is here: machine.py (the machine, timing) · decode.py (tokens, the engine) · train.py."""
