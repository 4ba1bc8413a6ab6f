"""Driver of an arm's process: starts it, sends commands, and kills it with all its descendants."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from s3kv.errors import S3KVError

START_TIMEOUT_S = 3_600.0
"""Time enough to download, load and compile a large model."""
ANSWER_TIMEOUT_S = 600.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOG_LINES = 25
_UTIME, _SESSION = 11, 3
"""Fields of /proc/PID/stat after the name: the CPU times start at the first."""


class ArmFailed(S3KVError):
    """The engine of an arm died, or did not answer in time. The message ends with its log."""


class ArmProcess:
    """The process of one arm, the leader of its own session. A context manager; not thread-safe.
    Methods raise `ArmFailed`.

    log: file for all output of the engine. module: run as the process.
    """

    module = "s3kv.prove.engine"

    def __init__(self, settings: Mapping[str, Any], log: Path) -> None:
        self._settings, self._log = settings, log
        self._unread = b""

    def __enter__(self) -> ArmProcess:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._write(self._settings)
            self._answer(START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.ask("end")
                self._process.wait(ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise self._failed("the engine did not end") from None
        finally:
            self._kill()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a command that has only one."""
        return next(self.answers(do, **arguments))

    def answers(self, do: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """An endless iterator over the answers to a command: the caller knows how many come."""
        self._write({"do": do, **arguments})
        while True:
            yield self._answer(ANSWER_TIMEOUT_S)

    def cpu_s(self) -> float:
        """Processor time of the living processes of the arm, in seconds."""
        ticks = (sum(map(int, each[_UTIME : _UTIME + 2])) for each in self._processes().values())
        return sum(ticks) / _TICKS_PER_S

    def _processes(self) -> dict[int, list[str]]:
        """The processes of the session, with the fields of their stat after the name."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[_SESSION]) == self._process.pid:
                    found[int(path.parent.name)] = fields
        return found

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("the engine has ended") from None

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], timeout_s)[0]:
                raise self._failed(f"the engine gave no answer in {timeout_s:.0f} s")
            if not (data := os.read(pipe, 1 << 20)):
                raise self._failed("the engine has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def _failed(self, why: str) -> ArmFailed:
        lines = self._log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:]
        return ArmFailed("\n".join([f"{why}; the end of its log:", *lines]))

    def _kill(self) -> None:
        """Kill every process of the arm, also those in process groups of their own."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
