"""Processes that have imported vLLM and fork engines: a start without the imports' seven seconds.

Engines of one zygote share the imported modules and the seed of Python's string hashes. Each has
a session, an environment and pipes of its own, as with `subprocess.Popen`.

    python -m lab.zygote FD     started by `Zygote`; FD is a socket that it takes launches from
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn

from lab import entry

ROOT = Path(__file__).resolve().parent.parent
MOST_ENVIRONMENT_BYTES = 128 * 1024
KEPT = 2
"""Zygotes at a time. Each takes 0.5 GiB."""

# Read when an engine starts, never by an import.
_LATE = ("AWS_", "LAB_CONSTANTS", "PYTEST_", "S3KV_", "VLLM_ENABLE_V1_MULTIPROCESSING")


class ForkedProcess:
    """An engine's process as `subprocess.Popen` has it; `returncode` is negative for a signal."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], status: int) -> None:
        self.stdin: IO[bytes] | None = stdin
        self.stdout: IO[bytes] | None = stdout
        self.returncode: int | None = None
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("lab.zygote", timeout or 0.0)
            self.returncode = int(self._status.readline() or -signal.SIGKILL)
            self._status.close()
        return self.returncode


class Zygotes:
    """The zygotes of this process, one for each environment that imports can see. Not thread-safe.

    Those used last are kept, `KEPT` of them.
    """

    def __init__(self) -> None:
        self._zygotes: dict[tuple[str, str], Zygote] = {}

    def launch(self, python: str, env: Mapping[str, str], log: IO[bytes]) -> ForkedProcess:
        """Start an engine's process, `lab.entry`, whose stderr is `log`."""
        seen = {name: value for name, value in env.items() if not name.startswith(_LATE)}
        key = (python, json.dumps(seen, sort_keys=True))
        zygote = self._zygotes.pop(key, None)
        if zygote is None:
            while len(self._zygotes) >= KEPT:
                self._zygotes.pop(next(iter(self._zygotes))).close()
            zygote = Zygote(python, seen)
        self._zygotes[key] = zygote  # last, as the one used last
        return zygote.launch(env, log)

    def close(self) -> None:
        """End the zygotes. Their engines go on."""
        while self._zygotes:
            self._zygotes.popitem()[1].close()


class Zygote:
    """A process that has imported vLLM. It ends when its socket does, and so with this process."""

    def __init__(self, python: str, env: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "lab.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(env),
                cwd=ROOT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def launch(self, env: Mapping[str, str], log: IO[bytes]) -> ForkedProcess:
        """Fork an engine's process; returns when there is one."""
        stdin, stdout, status = os.pipe(), os.pipe(), os.pipe()
        passed = [stdin[0], stdout[1], log.fileno(), status[1]]
        socket.send_fds(self._channel, [json.dumps(dict(env)).encode()], passed)
        for fd in (stdin[0], stdout[1], status[1]):
            os.close(fd)
        return ForkedProcess(os.fdopen(stdin[1], "wb"), os.fdopen(stdout[0], "rb"), status[0])

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def serve(channel: socket.socket) -> None:
    """Fork an engine for every launch, until the socket ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the watchers leave no zombies
    gc.collect()
    gc.freeze()
    while True:
        environment, fds, *_ = socket.recv_fds(channel, MOST_ENVIRONMENT_BYTES, 4)
        if not environment:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            watch(json.loads(environment), *fds)
        for fd in fds:
            os.close(fd)


def watch(env: dict[str, str], stdin: int, stdout: int, log: int, status: int) -> NoReturn:
    """Fork the engine; write its process number to `status`, at its end the exit code."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(status)
        for fd, standard in ((stdin, 0), (stdout, 1), (log, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        os.environ.clear()
        os.environ.update(env)
        random.seed()
        entry.run()
    for fd in (stdin, stdout, log):
        os.close(fd)
    os.write(status, b"%d\n" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, b"%d\n" % code)
    os._exit(0)


if __name__ == "__main__":
    import lab.child  # noqa: F401 - imports vLLM

    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)
