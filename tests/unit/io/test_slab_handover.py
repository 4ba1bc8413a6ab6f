"""Handing one slab to several processes."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from s3kv.errors import UnsupportedError
from s3kv.host.slab import Slab
from s3kv.io.slab_handover import SlabTaker, offer_slab, rendezvous
from tests.waiting import wait_until


def new_name(rank: int = 0) -> str:
    return rendezvous(uuid.uuid4().hex, 0, rank)


def take_in_child(name: str, at: int, leave: Any) -> None:
    """A worker: writes into what it is handed."""

    def take(slab: Slab) -> None:
        slab.view[at : at + 3] = b"abc"

    taker = SlabTaker(name, take, b"word")
    leave.wait(250)
    taker.close()


def test_what_a_child_writes_the_parent_reads() -> None:
    slab = Slab.create(8192)
    context = multiprocessing.get_context("spawn")
    names, leave = [new_name(), new_name(1)], context.Event()
    children = [
        context.Process(target=take_in_child, args=(name, 100 * n, leave), daemon=True)
        for n, name in enumerate(names)
    ]
    for child in children:
        child.start()
    wait_until("the children listen", lambda: all(map(is_listening, names)))
    assert offer_slab(names, slab, 250.0) == [b"word", b"word"]
    assert bytes(slab.view[0:3]) == b"abc"
    assert bytes(slab.view[100:103]) == b"abc"
    leave.set()
    for child in children:
        child.join(250)
        assert child.exitcode == 0
    slab.close()


def is_listening(name: str) -> bool:
    """/proc/net/unix shows abstract sockets with an @."""
    return "@" + name[1:] in Path("/proc/net/unix").read_text()


def test_a_worker_that_is_not_there_is_said_so() -> None:
    slab = Slab.create(4096)
    with pytest.raises(UnsupportedError, match=r"cannot be reached.*ec_producer"):
        offer_slab([new_name()], slab, 1.0)
    slab.close()


def test_a_worker_that_fails_to_take_it_is_said_so() -> None:
    def refuse(slab: Slab) -> None:
        raise OSError("no memory to map it")

    slab, name = Slab.create(4096), new_name()
    taker = SlabTaker(name, refuse, b"word")
    closer = threading.Timer(0.2, taker.close)
    closer.start()
    with pytest.raises(UnsupportedError, match="cannot be reached"):
        offer_slab([name], slab, 5.0)
    closer.join()
    slab.close()


def test_a_name_in_use_is_refused() -> None:
    name = new_name()
    taker = SlabTaker(name, lambda slab: None, b"word")
    with pytest.raises(OSError, match="in use"):
        SlabTaker(name, lambda slab: None, b"word")
    taker.close()
    SlabTaker(name, lambda slab: None, b"word").close()


STRANGER = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
socket.send_fds(sock, [b"x"], [os.memfd_create("forged")])
print(sock.recv(10))
"""


def test_a_stranger_cannot_hand_a_worker_a_slab(caplog: pytest.LogCaptureFixture) -> None:
    """Not even one of the same user: a child of this process is neither it nor its parent."""
    name = new_name()
    taken: list[Slab] = []
    taker = SlabTaker(name, taken.append, b"word")
    command = [sys.executable, "-c", STRANGER, name[1:]]
    for _ in range(3):
        answer = subprocess.run(command, capture_output=True, timeout=250, check=False)
        assert b"word" not in answer.stdout
    assert caplog.text.count("a process other than the parent sent it") == 1, "once a minute"
    slab = Slab.create(4096)
    assert offer_slab([name], slab, 250.0) == [b"word"], "who comes after is served"
    assert len(taken) == 1
    taker.close()
    slab.close()


def test_a_process_of_another_user_is_sent_no_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, name = Slab.create(4096), new_name()
    taker = SlabTaker(name, lambda slab: None, b"word")
    monkeypatch.setattr("os.getuid", lambda: -1)
    monkeypatch.setattr("socket.send_fds", None)
    with pytest.raises(UnsupportedError, match="another user listens under its name"):
        offer_slab([name], slab, 5.0)
    taker.close()
    slab.close()
