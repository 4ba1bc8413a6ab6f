"""Processes that have imported vLLM and fork engines: a start without the imports' seven seconds.

Engines of one zygote share the imported modules and the seed of Python's string hashes. Each has
a session, an environment and pipes of its own, as with `subprocess.Popen`.

    python -m lab.zygote FD MODULE   started by `Zygote`, which has it import the module; FD is a
                                     socket that it takes launches from
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.context
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from lab import entry

ROOT = Path(__file__).resolve().parent.parent
MOST_LAUNCH_BYTES = 128 * 1024
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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

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


Process = subprocess.Popen[bytes] | ForkedProcess


class Zygotes:
    """The zygotes of this process, one for each environment that imports can see. Not thread-safe.

    Those used last are kept, `KEPT` of them.
    """

    def __init__(self) -> None:
        self._zygotes: dict[tuple[str, ...], Zygote] = {}

    def launch(
        self,
        python: str,
        env: Mapping[str, str],
        log: IO[bytes],
        program: Sequence[str] = (),
        imports: str = "lab.child",
        *,
        piped: bool = False,
    ) -> ForkedProcess:
        """Start an engine's process, `lab.entry`, whose stderr is `log`.

        program: instead of it, a module and its arguments, whose stdout is `log`, too, unless it is
        `piped`; what it spawns is forked. imports: the module that the zygote has imported.
        """
        seen = {name: value for name, value in env.items() if not name.startswith(_LATE)}
        key = (python, imports, json.dumps(seen, sort_keys=True))
        zygote = self._zygotes.pop(key, None)
        if zygote is None:
            while len(self._zygotes) >= KEPT:
                self._zygotes.pop(next(iter(self._zygotes))).close()
            zygote = Zygote(python, seen, imports)
        self._zygotes[key] = zygote  # last, as the one used last
        return zygote.launch(env, log, program, piped=piped or not program)

    def popen(self, command: Sequence[str], *, stderr: IO[bytes], **options: Any) -> ForkedProcess:
        """`subprocess.Popen` of ``python -m MODULE`` with pipes, in a session of its own."""
        python, _, *program = command
        return self.launch(python, os.environ, stderr, program, piped=True)

    def close(self) -> None:
        """End the zygotes. Their engines go on."""
        while self._zygotes:
            self._zygotes.popitem()[1].close()


class Zygote:
    """A process that has imported vLLM. It ends when its socket does, and so with this process."""

    def __init__(self, python: str, env: Mapping[str, str], imports: str) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "lab.zygote", str(theirs.fileno()), imports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(env),
                cwd=ROOT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def launch(
        self, env: Mapping[str, str], log: IO[bytes], program: Sequence[str], *, piped: bool
    ) -> ForkedProcess:
        """Fork a process; returns when there is one."""
        stdin, stdout, status = os.pipe(), os.pipe(), os.pipe()
        passed = [stdin[0], stdout[1] if piped else log.fileno(), log.fileno(), status[1]]
        socket.send_fds(self._channel, [json.dumps([dict(env), [*program]]).encode()], passed)
        for fd in (stdin[0], stdout[1], status[1]):
            os.close(fd)
        input, output = os.fdopen(stdin[1], "wb"), os.fdopen(stdout[0], "rb")
        if not piped:
            input.close()
            output.close()
        return ForkedProcess(input, output, status[0])

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def serve(channel: socket.socket) -> None:
    """Fork an engine for every launch, until the socket ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the watchers leave no zombies
    gc.collect()
    gc.freeze()
    # vLLM's shutdown would thaw all this and look through it twice, a second for every engine.
    gc.unfreeze = lambda: None
    while True:
        launch, fds, *_ = socket.recv_fds(channel, MOST_LAUNCH_BYTES, 4)
        if not launch:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            watch(*json.loads(launch), *fds)
        for fd in fds:
            os.close(fd)


def watch(
    env: dict[str, str], program: list[str], stdin: int, stdout: int, log: int, status: int
) -> NoReturn:
    """Fork the process; write its number to `status`, at its end the exit code."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(status)
        for fd, standard in ((stdin, 0), (stdout, 1), (log, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        if program:
            with contextlib.suppress(ImportError):  # it finds its place by the first environment
                importlib.import_module("setproctitle").getproctitle()
        os.environ.clear()
        os.environ.update(env)
        random.seed()
        run(program) if program else entry.run()
    for fd in (stdin, stdout, log):
        os.close(fd)
    os.write(status, b"%d\n" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, b"%d\n" % code)
    os._exit(0)


def run(program: list[str]) -> NoReturn:
    """As `python -m` does."""
    # vLLM spawns its engine, which would import everything again. The fork leaves its parent's
    # loop the signals that are its parent's.
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    sys.argv = program
    try:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        entry.end(ended.code if isinstance(ended.code, int) else bool(ended.code))
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        entry.end(1)
    entry.end(0)


if __name__ == "__main__":
    importlib.import_module(sys.argv[2])
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        importlib.import_module("vllm.v1.worker.cpu_worker")  # vLLM imports it by name, and late
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening)
