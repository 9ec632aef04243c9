"""objective.py · head_loss.py · routes.py · optimizer.py · checkpoint.py · distributed.py · trainer.py."""
