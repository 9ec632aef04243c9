"""Serving over HTTP: server.py (start, drain, stop; keys, hosts, bodies) · app.py (routes, the page in page/) ·
protocol.py (the bodies of requests, errors) · answers.py (the bodies of answers) · service.py (admission, a
generation up to its line in the log, metrics) · engine_process.py (the pipe to the engine) · worker.py (the engine's
process) · replicas.py (several servers behind one address, by Ray)."""
