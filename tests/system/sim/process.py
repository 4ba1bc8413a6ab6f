"""An I/O process that is no process: the real service, on the virtual loop, behind a pipe.

It takes the place of `s3kv.io.child.Child`, so the worker's real client starts, feeds, kills and
buries it; and it can die or stop at any moment. What a dead process leaves behind is what the
kernel would leave: bytes it has sent are still to be read, requests may still reach the bucket.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol

from s3kv.errors import ConfigError
from s3kv.io import wire
from s3kv.io.server.service import Service
from s3kv.io.sources.compressing import Compressor
from s3kv.io.sources.encrypted_directory import EncryptedDirectory
from s3kv.io.sources.encrypted_store import EncryptedStore
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.stores.disk import Directory
from s3kv.stores.store import ObjectStore
from s3kv.types import ChunkKey
from tests.system.sim.compressing import Form, compressor_of
from tests.system.sim.disk_workers import VirtualWorkers
from tests.system.sim.encrypting import Secrets, WatchedKeyring
from tests.system.sim.loop import OWNER, Owner, VirtualLoop
from tests.system.sim.memory_disk import ROOT, Disk, Kernel
from tests.system.sim.store import Bucket, Connection

_PIPE_S = 0.0005
_START_S = 0.3
_UNKILLABLE_S = 0.2
"""At most so long the kernel takes to end a process; until then it may still write."""


@dataclass
class Machine:
    """What a process runs on. `Slab.fd` of the simulated slab, where a real one has a number."""

    loop: VirtualLoop
    rng: random.Random
    bucket: Bucket
    slab: Any
    processes: list[Process]
    oracle: Jobs
    disk: Disk | None = None
    form: Form = "plain"
    secrets: Secrets = ()


class Jobs(Protocol):
    """Sees every job's end at the moment the service tells it."""

    def job_ended(
        self, order: Order, done: JobEnd, slab: memoryview, connection: Connection
    ) -> None: ...

    def accuse(self, what: str) -> None: ...


@dataclass(frozen=True)
class Order:
    kind: JobKind
    object_key: str
    key: ChunkKey
    shard: str
    namespace_digest: str
    offset: int
    started_s: float
    is_borrowed: bool


class Process:
    """One simulated I/O process, and the worker's end of its pipe."""

    def __init__(self, machine: Machine, module: str, processors: Any) -> None:
        self.pid = 1000 + len(machine.processes)
        self.hung_up = False
        self.frozen = False
        self._frozen_at_s = 0.0
        self.connection = Connection(machine.bucket)
        self.connection.secrets = machine.secrets
        self._machine = machine
        self._keyring: WatchedKeyring | None = None
        if machine.secrets:
            names = machine.bucket.names
            self._keyring = WatchedKeyring(machine.secrets, names, self._check_slot)
        self._kernel = machine.disk and Kernel(machine.disk, self.connection.hung, self._check_slot)
        self._loop = machine.loop
        self._owner = Owner()
        self._context = copy_context()
        self._context.run(OWNER.set, self._owner)
        self._down, self._up = wire.FrameReader(wire.Down), wire.FrameReader(wire.Up)
        self._posted: list[wire.Down] = []
        self._unheard: deque[bytes] = deque()
        self._unsaid: list[wire.Up] = []
        self._arrived: deque[bytes] = deque()
        self._service: Service | None = None
        self.orders: dict[int, Order] = {}
        """Jobs received and not ended; it may use their slots."""
        self._listens = False
        self._finishing = False
        self._dead = False
        machine.processes.append(self)
        self._later(_START_S * machine.rng.random(), self._listen)

    def post(self, message: wire.Down) -> None:
        self._posted.append(message)

    @property
    def has_unsent(self) -> bool:
        return bool(self._posted)

    def flush(self) -> None:
        posted, self._posted = self._posted, []
        if posted and not self.hung_up:
            self._later(_PIPE_S, self._hear, wire.encode(posted))

    def receive(self, wait_s: float = 0.0) -> list[wire.Up]:
        until_s = self._loop.time() + wait_s
        while not self._arrived and (now_s := self._loop.time()) < until_s:
            self._loop.run_until(min(now_s + 0.01, until_s))
        messages: list[wire.Up] = []
        while self._arrived:
            data = self._arrived.popleft()
            messages += self._up.feed(data)
            self.hung_up = self.hung_up or not data
        return messages

    def kill(self) -> None:
        self.hung_up = True
        self._later(_UNKILLABLE_S * self._machine.rng.random(), self.die)

    def is_dead(self) -> bool:
        return self._dead

    was_killed = True

    def last_words(self) -> str:
        return f"the I/O process {self.pid} has ended"

    def end(self, timeout_s: float) -> None:
        self.hang_up()
        self.hung_up = True
        self._loop.run_until(self._loop.time() + (0.0 if self._dead else timeout_s))
        if not self._dead:
            self.kill()
            self._loop.run_until(self._loop.time() + _UNKILLABLE_S)

    def hang_up(self) -> None:
        """The worker closes its end, or is dead."""
        self._later(_PIPE_S, self._hear, b"")

    def freeze(self) -> None:
        if not self.frozen:
            self.frozen = True
            self._frozen_at_s = self._loop.time()
            self.connection.freeze()

    def thaw(self) -> None:
        if self.frozen and not self._dead:
            self.frozen = False
            stood_s = self._loop.time() - self._frozen_at_s
            self.connection.frozen_s += stood_s
            self.connection.stood_s = max(self.connection.stood_s, stood_s)
            self.connection.thaw()
            self._later(0.0, self._hear_all)
            self._later(0.0, self._say)

    def die(self) -> None:
        """As by SIGKILL: from now on it does nothing."""
        if self._dead:
            return
        self._dead = True
        self.connection.alive = False
        if self._kernel is not None:
            self._kernel.die()
        self.connection.thaw()
        self._owner.die()
        self._later(_PIPE_S, self._arrived.append, b"")

    def _later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(delay_s, call, *args, context=self._context)

    def _listen(self) -> None:
        self._listens = True
        self._hear_all()

    def _hear(self, data: bytes) -> None:
        self._unheard.append(data)
        self._hear_all()

    def _hear_all(self) -> None:
        while self._unheard and self._listens and not self.frozen and not self._dead:
            data = self._unheard.popleft()
            if not data:
                self._finish()
            for message in self._down.feed(data):
                self._receive(message)

    def _receive(self, message: wire.Down) -> None:
        if isinstance(message, wire.Handshake):
            self._handshake = message
            self._service = Service(
                message,
                self._machine.slab,
                self._store,
                self._send,
                self._finish,
                random.Random(self._machine.rng.random()),
                self._open_disk(message.config.prefix),
                self._open_compressor(),
            )
            self._service.start()
            return
        assert self._service is not None, "the first message is no Handshake"
        if isinstance(message, BucketJob):
            self._note(message)
        self._service.receive(message)

    @property
    def _store(self) -> ObjectStore:
        keyring = self._keyring
        return self.connection if keyring is None else EncryptedStore(self.connection, keyring)

    def _open_disk(self, prefix: str) -> tuple[Directory, VirtualWorkers] | None:
        disk, kernel = self._machine.disk, self._kernel
        if disk is None or kernel is None:
            return None
        with kernel.entered():
            try:
                directory = Directory.open(ROOT, prefix, disk.most_bytes)
            except ConfigError as error:
                self._machine.oracle.accuse(f"a disk keeps an engine from its start: {error}")
                return None
        if self._keyring is not None:
            directory = EncryptedDirectory(directory, self._keyring)
        return directory, VirtualWorkers(kernel, self.connection)

    def _open_compressor(self) -> Compressor | None:
        machine = self._machine
        return compressor_of(
            machine.form,
            self.connection,
            random.Random(machine.rng.random()),
            self._loop.time,
            self._check_slot,
            seals=machine.disk is not None,
            pads=bool(machine.secrets),
        )

    def _check_slot(self, memory: memoryview, kind: JobKind = JobKind.FETCH) -> None:
        """The disk or the codec uses it, so it is in the slot of such a job that has not ended."""
        slab = self._machine.slab.view
        at = _address(memory) - _address(slab)
        orders = (order for order in self.orders.values() if order.kind is kind)
        slot_bytes = self._handshake.slot_bytes
        if 0 <= at < slab.nbytes and not any(at - o.offset in range(slot_bytes) for o in orders):
            self._machine.oracle.accuse(f"a slot is used by a {kind.value} whose job has ended")

    @property
    def disk_counters(self) -> Counter[str]:
        source = self._service and self._service._disk
        return Counter(source.counters if source else ())

    @property
    def compression_counters(self) -> Counter[str]:
        compressor = self._service and self._service._compressor
        return Counter(compressor.counters | compressor.decoder.counters if compressor else ())

    def _note(self, message: BucketJob) -> None:
        self.orders[message.job_id] = order = Order(
            message.kind,
            self._object_key(message.key),
            message.key,
            self._handshake.shard,
            self._handshake.namespace_digest,
            message.slot * self._handshake.slot_bytes,
            self._loop.time(),
            self._handshake.is_borrowed,
        )
        self.connection.fetching[order.object_key] += order.kind is JobKind.FETCH

    def _object_key(self, key: ChunkKey) -> str:
        # Spelled out, and not taken from the code under test.
        name = key.block_hash.hex()
        root = f"{self._handshake.namespace_prefix}/v3/{self._handshake.namespace_digest}"
        return f"{root}/{name[:2]}/{name}/g{key.group}-{self._handshake.shard}.safetensors"

    def _send(self, message: wire.Up) -> None:
        if self._dead:
            return
        if isinstance(message, JobEnd):
            order = self.orders.pop(message.job_id)
            self.connection.fetching[order.object_key] -= order.kind is JobKind.FETCH
            slab = self._machine.slab.view
            self._machine.oracle.job_ended(order, message, slab, self.connection)
        if not self._unsaid:
            self._later(0.0, self._say)
        self._unsaid.append(message)

    def _say(self) -> None:
        if self._unsaid and not self.frozen and not self._dead:
            self._later(_PIPE_S, self._arrived.append, wire.encode(self._unsaid))
            self._unsaid = []

    def _finish(self) -> None:
        """The stream is over: as `s3kv.io.server.process` does it."""
        if self._finishing:
            return
        self._finishing, self._listens = True, False
        self._unheard.clear()
        if self._service is None:
            self.die()
            return
        finishing = self._loop.create_task(self._service.finish())
        finishing.add_done_callback(lambda _: self._later(_PIPE_S * 2, self.die))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
