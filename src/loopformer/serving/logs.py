"""The log of the server and of the engine's process: one JSON object a line, on stderr.

log_as_json(); logger.info(json.dumps({"event": "request", "status": 200}))
"""

from __future__ import annotations

import json
import logging
import sys


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; a message that is one already gets the time and the level."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        content = json.loads(message) if message.startswith("{") else {"event": "log", "message": message}
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        when = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return json.dumps({"time": when, "level": record.levelname.lower(), **content}, ensure_ascii=False)


def log_as_json() -> None:
    """The log of this process goes to stderr, one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    for name in ("loopformer", "uvicorn"):
        logging.getLogger(name).handlers = [handler]
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
