"""The I/O process's loop, from the first message to the last.

The process runs one asyncio loop on one thread. Other threads prefault the slab, and look up
credentials. The process ends when the stream does, or when its parent process changes (another
child of the worker may hold a copy of the stream's other end). Jobs are then cancelled, except
after a `Drain`, which may use all of its timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.server.keyring import open_keyring
from s3kv.io.server.service import Service
from s3kv.io.sources.compressing import open_compressor
from s3kv.io.sources.disk import PATIENCE_S, WorkerThreads
from s3kv.io.sources.encrypted_directory import EncryptedDirectory
from s3kv.io.sources.encrypted_store import EncryptedStore
from s3kv.objects.encryption import Keyring
from s3kv.stores.disk import Directory
from s3kv.stores.store import ObjectStore

_log = logging.getLogger("s3kv.io")

_CHECK_S = 1.0
STALL_S = 25.0
"""Time after which the stacks of all threads are logged if the bucket has not been tried, or if the
loop has stalled. Shortly afterwards the worker gives up the process."""
_CLOSE_TIMEOUT_S = 1.0
_RECEIVE_BYTES = 2**16


async def serve(
    sock: socket.socket,
    slab: Slab,
    make_store: Callable[[Config], ObjectStore],
    *,
    parent_pid: int | None = None,
    rng: random.Random | None = None,
) -> None:
    """Serve the worker at the other end of `sock` until it hangs up.

    Takes ownership of `sock`; `slab` stays the caller's. End the process afterwards. parent_pid:
    the worker's; serving also ends when this process has another parent. Raises `WireError` if the
    worker breaks the protocol.
    """
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    outbox = _MessageWriter(writer)
    watching = asyncio.get_running_loop().create_task(_watch(parent_pid, outbox, reader.feed_eof))
    try:
        await _converse(reader, outbox, slab, make_store, rng or random.Random())
    finally:
        watching.cancel()
        await outbox.close()


async def _converse(
    reader: asyncio.StreamReader,
    outbox: _MessageWriter,
    slab: Slab,
    make_store: Callable[[Config], ObjectStore],
    rng: random.Random,
) -> None:
    messages = _messages(reader)
    handshake = await anext(messages, None)
    if handshake is None:
        return
    if not isinstance(handshake, wire.Handshake):
        raise wire.WireError(f"the first message is {handshake!r}, not Handshake")
    config, compressor = handshake.config, None
    try:
        keyring = await open_keyring(config)
        disk = await _disk_of(config, keyring)
        if handshake.item_dtype is None:  # items are never compressed
            compressor = await asyncio.to_thread(open_compressor, config, time.perf_counter)
        store = make_store(config)
        if keyring is not None:
            store = EncryptedStore(store, keyring)
    except ConfigError as error:
        outbox.send(wire.Ready(False, "config", wire.truncated(str(error))))
        return
    service = Service(handshake, slab, store, outbox.send, reader.feed_eof, rng, disk, compressor)
    with _prefaulting(slab):
        service.start()
        try:
            async for message in messages:
                service.receive(message)
        finally:
            await service.finish()


async def _disk_of(config: Config, keys: Keyring | None) -> tuple[Directory, WorkerThreads] | None:
    """The disk of the settings. If it cannot be used, raises `ConfigError` or returns None,
    depending on `on_unavailable`."""
    if config.disk_path is None:
        return None
    path, prefix, nbytes = config.disk_path, config.prefix, config.disk_bytes
    threads = WorkerThreads(config.max_inflight_requests)
    try:
        opening = threads.read(lambda: Directory.open(path, prefix, nbytes))
        directory = await asyncio.wait_for(opening, PATIENCE_S)
    except asyncio.TimeoutError:  # it hangs, which costs only its hits
        directory = Directory(Path(path), prefix, nbytes)
    except ConfigError as error:
        if config.on_unavailable == "fail":
            raise
        _log.warning("%s. The disk is off until the next start", error)
        return None
    if keys is not None:
        directory = EncryptedDirectory(directory, keys)
    return directory, threads


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[wire.Down]:
    """Messages from the worker, until it hangs up."""
    frames = wire.FrameReader(wire.Down)
    while True:
        try:
            data = await reader.read(_RECEIVE_BYTES)
        except ConnectionError:  # the worker has ended with answers unread
            return
        if not data:
            return
        for message in frames.feed(data):
            yield message


class _MessageWriter:
    """Writer of messages to the worker: one write for all messages of one turn of the loop.
    is_used: whether any was sent; the first is `Ready`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.is_used = False
        self._writer = writer
        self._messages: list[wire.Up] = []

    def send(self, message: wire.Up) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)
        self.is_used = True

    def _flush(self) -> None:
        if self._messages and not self._writer.is_closing():
            self._writer.write(wire.encode(self._messages))
        self._messages.clear()

    async def close(self) -> None:
        self._flush()
        self._writer.close()
        with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
            await asyncio.wait_for(self._writer.wait_closed(), _CLOSE_TIMEOUT_S)


async def _watch(
    parent_pid: int | None, outbox: _MessageWriter, hang_up: Callable[[], None]
) -> None:
    if parent_pid is None:
        return
    is_first = True
    while os.getppid() == parent_pid:  # no event reports a change
        if is_first or outbox.is_used:
            with contextlib.suppress(RuntimeError):  # the system refuses a thread
                faulthandler.dump_traceback_later(STALL_S)
        is_first = False
        await asyncio.sleep(_CHECK_S)
    hang_up()


@contextlib.contextmanager
def _prefaulting(slab: Slab) -> Iterator[None]:
    """Prefault the slab on a thread during the block; stop the thread at its end."""
    slab.ask_for_huge_pages()
    stop = threading.Event()
    thread = threading.Thread(target=_prefault, args=(slab, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _prefault(slab: Slab, stop: threading.Event) -> None:
    try:
        slab.prefault(stop.is_set)
    except ConfigError as error:
        _log.warning("%s", error)
