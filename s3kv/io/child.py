"""Transport to one I/O process: starts it, exchanges messages with it, and ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from s3kv.io import wire
from s3kv.io.process_log import LogPipe

_RECEIVE_BYTES = 2**16
_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables by which OpenMP binds threads to cores; the first thread is bound when the library is
loaded. vLLM's CPU workers load it into every process they start (LD_PRELOAD)."""
_KILLED_S = 2.0
"""Longest wait for a killed process. It cannot end while its disk hangs, but it runs no code."""
_LAST_LINES_S = 0.2
"""Longest wait for the last lines of a dead process to be logged."""
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
    """One I/O process, from its start until it has been reaped. Used by one thread. `end` blocks,
    and so does `receive`, for up to `wait_s`.

    It stays in the worker's process group: a signal that a terminal or a supervisor sends to the
    group reaches both, and SIGKILL ends both. SIGINT, SIGTERM and SIGHUP do not end it.
    Its output is logged in this process (`io.process_log`).
    """

    def __init__(
        self, slab_fd: int, module: str, processors: Collection[int] | None = None
    ) -> None:
        """Start `python -m module` on these processors, even if the calling thread is bound to
        others; None: on that thread's. Raises `OSError` if the system cannot start it."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._frames = wire.FrameReader(wire.Up)
        self._posted: list[wire.Down] = []
        self._unsent = bytearray()
        self.hung_up = False
        """Whether the stream has ended, so that no message can be received or sent any more."""
        try:
            self._process = _spawn(theirs.fileno(), slab_fd, module)
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()
        assert self._process.stdout is not None
        try:
            self._log = LogPipe(self._process.stdout, self._process.pid)
        except RuntimeError as error:  # the system refuses a thread
            self._sock.close()
            with self._process:
                self._process.kill()
            raise OSError(str(error)) from error
        if processors is not None:
            try:
                os.sched_setaffinity(self._process.pid, processors)
            except OSError as error:  # if it is dead, that is reported elsewhere
                logging.getLogger("s3kv").warning("I/O process not bound to cores: %s", error)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_unsent(self) -> bool:
        return bool(self._posted or self._unsent)

    def post(self, message: wire.Down) -> None:
        """Queue a message for the next `flush`."""
        self._posted.append(message)

    def flush(self) -> None:
        """Send as much of the queue as the socket takes now, and keep the rest."""
        if not self.has_unsent:
            return
        self._unsent += wire.encode(self._posted)
        self._posted.clear()
        if self.hung_up:
            return
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The process is dead. The messages it sent can still be read; then the stream ends.
            self._unsent.clear()

    def receive(self, wait_s: float = 0.0) -> list[wire.Up]:
        """The messages that have arrived since the last call. Sets `hung_up` at the end of the
        stream.

        wait_s: longest wait for a message, or for the socket to take more of the queue; an hour at
            most.
        Raises `WireError` if the process breaks the protocol; `kill` it then.
        """
        if wait_s:
            poller = select.poll()  # select() takes no descriptor above 1023
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poller.poll(1000 * min(wait_s, 3600.0))  # it accepts a few weeks at most
        messages: list[wire.Up] = []
        while not self.hung_up:
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.hung_up = not data
            messages.extend(self._frames.feed(data))
        return messages

    def kill(self) -> None:
        """Send SIGKILL, without waiting for the process to end. Sets `hung_up`."""
        self.hung_up = True
        self._process.kill()

    def is_dead(self) -> bool:
        """Whether the kernel has confirmed its end, so that it no longer writes to the slab."""
        return self._process.poll() is not None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the dead process."""
        return self._process.returncode == -signal.SIGKILL

    def last_words(self) -> str:
        """A sentence on how the process ended. Call it only when `is_dead`."""
        status = self._process.returncode
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the I/O process {self.pid} has ended with {how}; the log has its last lines"

    def end(self, timeout_s: float) -> None:
        """Hang up and wait for the process to end; kill it after `timeout_s`."""
        if not self.is_dead():  # a process forked from this one may hold the stream open
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self.hung_up = True
        for wait_s in (timeout_s, _KILLED_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                break
            self._process.kill()
        self._log.finish(_LAST_LINES_S)


def _spawn(sock_fd: int, slab_fd: int, module: str) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", module]
    command += ["--fd", str(sock_fd), "--slab-fd", str(slab_fd), "--parent-pid", str(os.getpid())]
    # Blocked signals stay blocked across exec, so a Ctrl-C cannot kill the process before it
    # handles the signal; the process then unblocks them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED)
    try:
        return subprocess.Popen(
            command,
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            pass_fds=(sock_fd, slab_fd),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment, without the variables that would bind the process to the model's
    cores, and with an import path to this s3kv.

    The path is left alone if s3kv is installed: site-packages in PYTHONPATH would come before the
    standard library, and old backports there would replace parts of it.
    """
    environment = {name: value for name, value in inherited.items() if name not in _BINDINGS}
    environment["PYTHONSAFEPATH"] = "1"
    home = Path(__file__).parents[2]
    if str(home) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        path = [str(home), inherited.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
    return environment
