"""Logs as one JSON object per line, for machines that collect them."""

import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from foundation.background import failed

logger = logging.getLogger(__name__)

# What a server says on standard error, in plain words, when it ends before it has begun.
NOT_STARTED = "the server did not start: "
_TAIL_BYTES = 65_536
_TAIL_LINES = 20
_LONGEST = 2000
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
        failed(name, error.exc_value, log=False)


def last_words(path: Path, since: int = 0) -> str:
    """Return what a process that has ended said in its log, for people: why it ended, if it did.

    `since`: where in the file its own words begin.
    """
    try:
        with path.open("rb") as log:
            log.seek(max(since, path.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
    for number, line in reversed(list(enumerate(lines))):
        if line.startswith(NOT_STARTED):  # Its reason may have several lines.
            rest = (one for one in lines[number:] if _record_of(one) is None)
            return _shortened(" ".join(map(str.strip, rest)))
        record = _record_of(line)
        if record is not None and record["level"] == "critical":
            return _shortened(_words_of(record))
    if not lines:
        return "it said nothing"
    record = _record_of(lines[-1])
    return _shortened(lines[-1].strip() if record is None else _words_of(record))


def _record_of(line: str) -> dict[str, Any] | None:
    """Return the fields of a line that we formatted; None for any other."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and {"level", "message"} <= fields.keys() else None


def _words_of(record: dict[str, Any]) -> str:
    """Return the message, and the error, if there was one: the last line of its traceback."""
    traceback = str(record.get("traceback", "")).strip().splitlines()
    return ": ".join([str(record["message"]), *traceback[-1:]])


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
