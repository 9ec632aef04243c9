"""How fast a model is here: machine.py (what it runs on, timing) · decode.py · train.py · memory.py."""
