"""Serving over HTTP: server.py (start, drain, stop; keys, hosts, bodies) · app.py (routes, the page in page/) ·
protocol.py (bodies of requests, errors) · answers.py (bodies of answers) · service.py (admission, generations,
metrics) · engine_process.py (the pipe to the engine) · messages.py (what goes through it) · worker.py (the engine's
process) · replicas.py (several servers behind one address, by Ray)."""
