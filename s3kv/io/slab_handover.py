"""Slab handover: one slab for the scheduler's process and the workers that read it.

The scheduler's side creates the slab and offers it to every worker that will load from it. Each
worker maps the slab, prepares it (pins it, on a GPU) and answers with a word of its own. All this
happens before the scheduler's side is up, so every worker can reach all items promised later.

A worker listens on an abstract Unix socket, which leaves no file behind; it is up before the
scheduler's side is created. The slab's descriptor is sent as ancillary data. A worker accepts a
slab only from its own process or its parent, and the scheduler sends one only to a process of its
own user, as reported by the kernel (SO_PEERCRED). A worker on another machine, or one started by
Ray, cannot be reached; nothing is then loaded from this slab.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from s3kv.errors import UnsupportedError
from s3kv.host.slab import Slab
from s3kv.types import once_a_minute

logger = logging.getLogger("s3kv")

_UCRED = struct.Struct("3i")
_MAX_WORD_BYTES = 256


def rendezvous(engine_id: str, *path: int) -> str:
    """Address that the worker at `path` of an engine listens on; the same in all its processes."""
    return "\0s3kv-" + "-".join([engine_id[:64], *map(str, path)])


class SlabTaker:
    """A worker's end of the handover.

    take: called once with the slab, on the taker's own thread; the taker owns the slab and closes
    it. word: the answer to the scheduler, not empty. Raises `OSError` if the name is in use.
    """

    def __init__(self, name: str, take: Callable[[Slab], None], word: bytes) -> None:
        self._take, self._word = take, word
        self._slab: Slab | None = None
        self._offerer: socket.socket | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.bind(name)
            self._sock.listen(1)
        except OSError:
            self._sock.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="s3kv-slab", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        may_log = once_a_minute(time.monotonic)
        with contextlib.suppress(OSError):  # closed before a peer connected
            while self._offerer is None:
                peer, _ = self._sock.accept()
                if _own_process(peer) in (os.getpid(), os.getppid()):
                    self._offerer = peer
                    continue
                peer.close()
                if may_log("refused"):
                    logger.warning("s3kv: refused a slab: a process other than the parent sent it")
        if self._offerer is not None:
            self._receive(self._offerer)

    def _receive(self, peer: socket.socket) -> None:
        try:
            _, fds, _, _ = socket.recv_fds(peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if fds:
                self._slab = Slab.attach(fds[0])
                self._take(self._slab)
                peer.sendall(self._word)
        except (OSError, RuntimeError) as error:
            logger.error("s3kv: this worker cannot use the slab of its scheduler: %s", error)
            peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and close the slab. Nothing may be reading from it. Idempotent."""
        for sock in (self._sock, self._offerer):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()
        self._thread.join()
        if self._slab is not None:
            self._slab.close()


def offer_slab(names: Sequence[str], slab: Slab, timeout_s: float) -> list[bytes]:
    """The scheduler's end: give the slab to every worker, and return their words. Blocks until all
    have answered.

    Raises `UnsupportedError` if one cannot be reached or does not answer within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        try:
            workers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in names]
            for worker, name in zip(workers, names, strict=True):
                _offer(worker, name, slab, timeout_s)
            return [_word_of(worker, deadline_s) for worker in workers]
        except OSError as error:
            raise UnsupportedError(
                f"a worker that is to load encoder outputs cannot be reached ({error}): s3kv can "
                "load them only if the workers are the scheduler's own process or its children "
                "(--distributed-executor-backend uni or mp). Use ec_role 'ec_producer' here"
            ) from error


def _offer(worker: socket.socket, name: str, slab: Slab, timeout_s: float) -> None:
    worker.settimeout(timeout_s)
    worker.connect(name)
    if _own_process(worker) is None:
        raise PermissionError("a process of another user listens under its name")
    socket.send_fds(worker, [b"\0"], [slab.fd])


def _word_of(worker: socket.socket, deadline_s: float) -> bytes:
    worker.settimeout(max(0.001, deadline_s - time.monotonic()))
    word = worker.recv(_MAX_WORD_BYTES)
    if not word:
        raise ConnectionError("it hung up without taking the slab; see its log")
    return word


def _own_process(peer: socket.socket) -> int | None:
    """The process at the other end; None if it has another user."""
    pid, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid) if uid == os.getuid() else None
