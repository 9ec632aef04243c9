"""Training's fast way through the shared stack on a GPU: passes.py is the way in."""
