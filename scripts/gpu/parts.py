"""Parts of a command, each a process of its own that ends in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import IO, Any

from lab.zygote import Process, Zygotes

ROOT = Path(__file__).resolve().parents[2]
_STACKS_S = 5.0
"""How long a process that has run out of time may take to print where it is."""
_REHEARSAL_S = 1200.0
"""How long a part may take where time is not short."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    program: arguments of the Python interpreter; `{out}` in them stands for the folder of results.
    rehearsal: the same for a machine without a GPU, from start to end where CUDA is not needed.
    stdout: the name of the result that the standard output is; without one it goes to the log.
    files: names of the results that the program writes itself.
    imports: a module that rehearsals import once, for all parts that name it.
    """

    name: str
    program: Sequence[str]
    rehearsal: Sequence[str]
    timeout_s: float
    stdout: str | None = None
    files: Sequence[str] = ()
    imports: str | None = None

    def results(self) -> list[str]:
        return [*self.files, *([self.stdout] if self.stdout else [])]


def run(
    name: str,
    stages: Sequence[Sequence[Part]],
    out: Path,
    env: Mapping[str, str],
    *,
    rehearse: bool,
) -> bool:
    """Whether all parts have ended well; one that has not keeps no other from its turn.

    Stages come one after another, and the parts of a stage run at once; one by one in a rehearsal.
    Writes `out`/`name`.json after every part, and what the programs say to `out`/`name`.log.
    """
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"command": name, "rehearsal": rehearse, "parts": {}}
    writing = Lock()
    with (
        (out / f"{name}.log").open("wb", buffering=0) as log,
        contextlib.closing(Zygotes()) as zygotes,
    ):

        def one(part: Part) -> None:
            begin_s = monotonic()
            with tempfile.TemporaryFile(dir=out, buffering=0) as said:
                end = _run(part, out, env, said, zygotes if rehearse else None)
                seconds = round(monotonic() - begin_s, 1)
                with writing:
                    said.seek(0)
                    log.write(f"\n== {part.name}: {end}, {seconds} s\n".encode() + said.read())
                    report["parts"][part.name] = {"end": end, "seconds": seconds}
                    print(f"{part.name}: {end}, {seconds} s", flush=True)
                    (out / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")

        for stage in stages:
            with ThreadPoolExecutor(1 if rehearse else len(stage)) as pool:
                list(pool.map(one, stage))
    return all(part["end"] == "ok" for part in report["parts"].values())


def _run(
    part: Part, out: Path, env: Mapping[str, str], said: IO[bytes], zygotes: Zygotes | None
) -> str:
    """zygotes: of a rehearsal."""
    program = part.program if zygotes is None else part.rehearsal
    command = [sys.executable, *(argument.replace("{out}", str(out)) for argument in program)]
    said.write(f"{' '.join(command)}\n".encode())
    env = {**env, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    target = (out / part.stdout).open("wb") if part.stdout else said
    process: Process
    if zygotes is not None and part.imports:
        process = zygotes.launch(sys.executable, env, said, command[2:], part.imports)
    else:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=said,
            start_new_session=True,
        )
    try:
        return _ended(process, part.timeout_s if zygotes is None else _REHEARSAL_S)
    finally:
        kill(process)
        if target is not said:
            target.close()


def _ended(process: Process, timeout_s: float) -> str:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"{'not over in' if aborted(process) else 'stuck for'} {timeout_s:g} s"
    return "ok" if code == 0 else f"failed with {code}"


def aborted(process: Process) -> bool:
    """Make Python print the stack of every thread. Returns whether the process has ended by it."""
    process.send_signal(signal.SIGABRT)
    try:
        process.wait(_STACKS_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def kill(process: Process) -> None:
    """It, and what it has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
