"""How fast a model is here: machine.py (on what, and timing) · decode.py · train.py (speed and memory)."""
