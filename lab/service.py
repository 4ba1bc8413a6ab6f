"""Programs of the lab in processes of their own, which cannot outlive whoever started them."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def started(module: str, *arguments: str, quiet: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`python -m MODULE ARGUMENTS` with pipes for stdin and stdout; killed when the block ends, in
    the middle of whatever it does. quiet: without its stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # Ctrl-C is for whoever started us
    )
    try:
        yield process
    finally:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.kill()
        process.wait()


def first_line(process: subprocess.Popen[str]) -> str:
    """What it says when it is ready."""
    assert process.stdout is not None
    return process.stdout.readline()


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports of `address` nobody listens on. This process holds them while it runs, so that the
    system gives them to no other before the server that they are for listens. That server needs
    SO_REUSEADDR, as is usual: then it may listen where another socket is only bound (socket(7))."""
    ports = []
    for _ in range(count):
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        ports.append(held.getsockname()[1])
        held.detach()
    return ports


def answers(url: str) -> bool:
    """Whether an HTTP server answers there itself, no proxy in its place, be it with an error."""
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with directly.open(url, timeout=5):
            return True
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
