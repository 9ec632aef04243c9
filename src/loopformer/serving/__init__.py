"""Serving over HTTP: server.py (start, drain, stop) · app.py (routes) · protocol.py (OpenAI's words and ours) ·
admission.py (who may come in, at which budget) · worker.py (the engine's process) · lens.py
(what it says after each loop) · gate.py (keys, hosts, bodies) · metrics.py (Prometheus) · logs.py."""
