"""Logs as one JSON object per line, for machines that collect them."""

import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from typing import TextIO

logger = logging.getLogger(__name__)

# What every record has; anything beyond it was given by `extra` and goes along.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


class JsonFormatter(logging.Formatter):
    """A line per record: time, level, logger, message, and whatever `extra` brought."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send the logs of this process to the stream (standard error) as JSON lines.

    And what else would go there as plain text: warnings, and errors that nobody catches. gRPC's own
    lines cannot be had as JSON and are turned off; call this before the first server or client.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: logger.critical("died of an error", exc_info=error)
    threading.excepthook = _log_thread_error


def _log_thread_error(error: threading.ExceptHookArgs) -> None:
    if error.exc_value is not None and error.exc_type is not SystemExit:
        name = error.thread.name if error.thread is not None else "a thread"
        exc_info = (error.exc_type, error.exc_value, error.exc_traceback)
        logger.critical("%s died of an error", name, exc_info=exc_info)
