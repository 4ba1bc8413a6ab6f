"""Starting, reaching and ending one I/O process, from the worker."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from s3kv.io import wire

_RECEIVE_BYTES = 2**16
_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""With these OpenMP binds threads to cores, the first as soon as its library is loaded; and vLLM's
workers for CPUs have it loaded into whatever they start (LD_PRELOAD)."""
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
    """One I/O process, from its start to its burial. Used by one thread; only `end` blocks.

    It stays in the worker's process group: what a terminal or a supervisor does to the group it
    does to both, and SIGKILL to the group leaves neither. It ignores every milder signal.
    """

    def __init__(self, slab_fd: int, module: str) -> None:
        """Start `python -m module`. Raises `OSError` when the system cannot."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._frames = wire.FrameReader(wire.Up)
        self._unsent = bytearray()
        self.hung_up = False
        """The stream is over: nothing more will come, and nothing can be said."""
        try:
            self._process = _spawn(theirs.fileno(), slab_fd, module)
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()

    def run_on(self, processors: Collection[int]) -> None:
        """Let it use these, whatever the thread that has started it is bound to."""
        # Gone already: its end is told elsewhere.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(self._process.pid, processors)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """For `select`: readable when `receive` has something to give."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, messages: list[wire.Down]) -> None:
        """Send what the socket takes now and keep the rest for the next call."""
        self._unsent += wire.encode(messages)
        if self.hung_up or not self._unsent:
            return
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # It is gone; what it said before is still to be read, the end of the stream follows.
            self._unsent.clear()

    def receive(self) -> list[wire.Up]:
        """What has come since. Sets `hung_up` at the end of the stream.

        Raises `WireError` when the process talks nonsense; `kill` it then.
        """
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
        """Have it dead soon."""
        self.hung_up = True
        self._process.kill()

    def is_dead(self) -> bool:
        """Whether the kernel has confirmed that it runs no more, nor writes to the slab."""
        return self._process.poll() is not None

    def last_words(self) -> str:
        """How a dead one died."""
        status = self._process.returncode
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the I/O process {self.pid} has ended with {how}; its messages are on stderr"

    def end(self, timeout_s: float) -> None:
        """Hang up, wait for its end, and after `timeout_s` enforce it."""
        self._sock.close()
        self.hung_up = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return
        self._process.kill()
        self._process.wait()


def _spawn(sock_fd: int, slab_fd: int, module: str) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", module]
    command += ["--fd", str(sock_fd), "--slab-fd", str(slab_fd), "--parent-pid", str(os.getpid())]
    # Blocked signals stay blocked across exec, so that a Ctrl-C before the process has come to
    # ignore it waits instead of killing; it unblocks them itself.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED)
    try:
        return subprocess.Popen(
            command,
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout belongs to the worker; should a library print, it shall not hurt
            pass_fds=(sock_fd, slab_fd),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The worker's, without what would bind it to the cores that the model computes on, and with an
    import path that finds this very s3kv.

    The path is left alone where s3kv is installed: site-packages in PYTHONPATH would come before
    the standard library, and old backports there would replace parts of it.
    """
    environment = {name: value for name, value in inherited.items() if name not in _BINDINGS}
    environment["PYTHONSAFEPATH"] = "1"
    home = Path(__file__).parents[2]
    if str(home) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        path = [str(home), inherited.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
    return environment
