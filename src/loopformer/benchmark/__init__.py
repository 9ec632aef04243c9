"""How fast a model is here: machine.py (what on, timing) · decode.py, decode_paths.py · train.py · memory.py."""
