"""Serving over HTTP: server.py (start, drain, stop; keys, hosts, bodies) · app.py (routes) · page/ (what `/` shows)
· protocol.py (OpenAI's words and ours) · service.py (a generation from admission to the log, metrics) ·
admission.py (who may come in, at which budget) · engine_process.py (the pipe to the engine) · worker.py (the
engine's process)."""
