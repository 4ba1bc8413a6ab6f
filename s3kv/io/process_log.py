"""The I/O process's log, which its worker writes.

The process prints each record as a line of JSON; the worker logs it in its own process, with the
time, level and place of the record. Lines that are not records (a crash, a library that prints) are
warnings. The configuration of `logging` in the worker thus applies to both.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import IO

import msgspec

LOGGER = "s3kv.io"


class _LogLine(msgspec.Struct):
    """A record, with the names of its fields. created: seconds since the epoch; None: now."""

    levelno: int
    pathname: str
    lineno: int
    message: str
    created: float | None


class _LineFormatter(logging.Formatter):
    """Formatter of a record as one line of JSON, its traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if not record.name.startswith(LOGGER):
            message = f"{record.name}: {message}"
        message = message.encode("utf-8", "backslashreplace").decode()  # names of odd files
        line = _LogLine(record.levelno, record.pathname, record.lineno, message, record.created)
        return msgspec.json.encode(line).decode()


def log_to_worker() -> None:
    """Print all records of this process for the worker. Called once, in the I/O process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger(LOGGER).setLevel(logging.INFO)


def record_of(line: str, pid: int) -> logging.LogRecord:
    """The record on a line that the I/O process `pid` has printed."""
    try:
        it = msgspec.json.decode(line, type=_LogLine)
    except (msgspec.MsgspecError, UnicodeError):
        it = _LogLine(logging.WARNING, __file__, 0, line.rstrip(), None)
    text = f"I/O process {pid}: {it.message}"
    # A custom factory may add fields that a formatter needs; vLLM's does.
    make = logging.getLogRecordFactory()
    record = make(LOGGER, it.levelno, it.pathname, it.lineno, text, None, None)
    if it.created is not None:
        record.created = it.created
    return record


class LogPipe:
    """Reader of one I/O process's output, on a thread of its own: an idle engine polls nothing,
    and a full pipe would stop the process. The thread ends when the process does."""

    def __init__(self, stream: IO[str], pid: int) -> None:
        """Takes ownership of `stream`."""
        self._stream, self._pid = stream, pid
        self._thread = threading.Thread(target=self._run, name=f"{LOGGER} log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        logger = logging.getLogger(LOGGER)
        with self._stream:
            for line in self._stream:
                record = record_of(line, self._pid)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)

    def finish(self, timeout_s: float) -> None:
        """Wait until the last line of the dead process has been logged."""
        self._thread.join(timeout_s)
