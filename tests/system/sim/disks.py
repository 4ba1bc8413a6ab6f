"""A fleet whose engines have a local disk before the bucket, from a seed.

Two hosts have one disk each, whose directory their engines share, and one engine may have none.
`Directory`, `DiskSource` and the cleaning are the real ones, over `memory_disk`. Beside the faults
of every fleet, disks are slow, hang, fail, fill up and lie, lose all files, and damage some. What
must hold, beside all that holds of every fleet:

1. A file with an object's name is that object, unless the disk has damaged it.
2. A directory exceeds its budget by no more than one object per writer.
3. Nothing from a disk is written to a slot whose job has ended, however long the disk hangs.
4. An engine starts, whatever is the matter with its disk.
5. In the end nothing is left of any writer that was killed, the bytes counted are those of the
   files, and every engine reads from its disk what the bucket has lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from unittest import mock

from s3kv.config import Config
from s3kv.io.sources import disk as source
from s3kv.stores import disk as stores_disk
from s3kv.stores.disk import Directory
from s3kv.upkeep.disk_cleaning import clean
from tests.system.encrypted_form import encrypted_bytes
from tests.system.sim import memory_disk
from tests.system.sim.fleet import Fleet, Happening
from tests.system.sim.meaning import Shard, format_of
from tests.system.sim.memory_disk import HEALTHY, ROOT, Disk, Kernel, key_of
from tests.system.sim.node import Node
from tests.system.sim.sharers import SharingFleet
from tests.unit.planning.setup import Setup

BUDGETS = (3, 6, 12)
"""In objects."""
_OFF_S = 1.5
_CLEAN_EVERY_S = 0.5


class DiskFleet(Fleet):
    gap_s = 0.1

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.disk_rng = rng = random.Random(f"disk {seed}")
        super().__init__(seed, log)
        self._object_bytes = format_of(Shard.of(0, 1, 0), Setup(chunk_tokens=8)).object_bytes
        if any(self.secrets):
            segment_bytes = self.constants["encrypted_segment_bytes"]
            self._object_bytes = encrypted_bytes(self._object_bytes, segment_bytes)
        self._copied_bytes = rng.choice([2, 100]) * self._object_bytes
        self.disks = [self._make_disk() for _ in range(2)]
        first, second = self.disks
        for node in self.nodes:
            node.disk = rng.choice([first, first, second, None])

    def draw_config(self) -> Config:
        writes = self.disk_rng.choice(["all", "all", "fetched"])
        return dataclasses.replace(super().draw_config(), disk_writes=writes)

    def _make_disk(self) -> Disk:
        rng = self.disk_rng
        return Disk(
            rng,
            rng.choice(BUDGETS) * self._object_bytes,
            self.loop.time,
            self.oracle.accuse,
            self.oracle.check_put,
            rng.choice([2**40, 12 * self._object_bytes]),
            is_sound=rng.random() < 0.25,
        )

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(memory_disk.under())
            stack.enter_context(mock.patch.object(stores_disk, "PIECE_BYTES", 1024))
            fast = {"OFF_S": _OFF_S, "_CLEAN_EVERY_S": _CLEAN_EVERY_S, "PATIENCE_S": 1.0}
            fast["MOST_COPIED_BYTES"] = self._copied_bytes
            stack.enter_context(mock.patch.multiple(source, **fast))
            stack.callback(self.loop.give_up)  # no thread goes on afterwards
            super().run()
        for disk in self.disks:
            self.seen += disk.seen

    def _check(self) -> None:
        for disk in self.disks:
            writers = sum(len(node.shards()) for node in self.nodes if node.disk is disk)
            most = disk.most_bytes + writers * self._largest(disk)
            if disk.counted_bytes > most:
                self.oracle.accuse(f"a disk holds {disk.counted_bytes} bytes, of {most} at most")
        super()._check()

    def _largest(self, disk: Disk) -> int:
        return max((len(file.data) for file in disk.files.values()), default=0)

    def happenings(self) -> list[Happening]:
        return [*super().happenings(), *MORE]

    def change_condition(self, node: Node) -> None:
        if node.disk is not None and not node.disk.is_sound:
            conditions, weights = zip(*memory_disk.CONDITIONS, strict=True)
            (node.disk.condition,) = self.disk_rng.choices(conditions, weights)
            self.log(f"the disk of engine {node.number} is {node.disk.condition.name}")

    def damage_file(self, node: Node) -> None:
        if node.disk is not None and (files := node.disk.objects()):
            path, other = (self.disk_rng.choice([*files]) for _ in range(2))
            data = bytes(files[other].data)
            if path == other and data:
                data = self.tampered(data)
            node.disk.damage(path, data)
            self.seen["files damaged"] += 1

    def tampered(self, data: bytes) -> bytes:
        at, kind = self.disk_rng.randrange(len(data)), self.disk_rng.randrange(3)
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return (flipped, data[:at], data + bytes(7))[kind]

    def lose_files(self, node: Node) -> None:
        if node.disk is not None and not node.disk.is_sound:
            node.disk.lose_everything(folders=self.disk_rng.random() < 0.5)
            self.seen["disks emptied"] += 1

    def spoil_folder(self, node: Node) -> None:
        if node.disk is not None and not node.disk.is_sound:
            node.disk.bad_folders.add(f"{ROOT}/v3")

    def clear_up(self) -> None:
        for disk in self.disks:
            disk.condition = HEALTHY
            disk.bad_folders.clear()
        super().clear_up()
        self.loop.run_until(self.loop.time() + 2 * _OFF_S)
        for node in self.nodes:
            self._use_disk(node)
        self.loop.run_until(self.loop.time() + 10.0)
        for disk in self.disks:
            self._check_disk(disk)

    def _use_disk(self, node: Node) -> None:
        """What an engine has written to its disk, it reads there when it has started again."""
        if node.disk is None or self.constants.get("recompute_gate"):
            return
        if node.seen["resets here"]:
            self._restart(node)
        for attempt in range(8):
            prompt = [ord("d"), node.number, attempt, *[ord("d")] * node.setup.chunk_tokens]
            self.publish(node, prompt)
            self._arrive(node, prompt, 1)
            self._come_to_rest()
            self.loop.run_until(self.loop.time() + 2 * _OFF_S)
            keys = node.keys(self._dictionary.chain(prompt))
            if not any(key in keys for key in map(key_of, node.disk.files)):
                continue
            self._restart(node)
            before = self.oracle.seen["disk hits"]
            self._arrive(node, prompt, 1)
            self._come_to_rest()
            if self.oracle.seen["disk hits"] > before:
                return
        raise AssertionError(f"engine {node.number} never uses its disk again")

    def _restart(self, node: Node) -> None:
        node.shut_down()
        self._start(node)
        self.loop.run_until(self.loop.time() + 1.0)  # it may not wait for its process

    def _end(self) -> None:
        super()._end()
        for process in (process for node in self.nodes for process in node.processes):
            self.seen["files damaged and read"] += process.disk_counters["io_disk_corrupt"]
            self.seen["objects dropped"] += process.disk_counters["io_disk_dropped"]
        sound = [disk for disk in self.disks if disk.is_sound]
        if self.seen["I/O processes stopped"]:  # and held a lock, perhaps
            return
        for node in self.nodes:
            for process in node.processes if node.disk in sound else ():
                failed = process.disk_counters["io_disk_failed"]
                assert not failed, f"process {process.pid} takes a sound disk for a failing one"

    def _check_disk(self, disk: Disk) -> None:
        """As the next process finds it; those that live may hold a lock for a moment."""
        for _ in range(60):
            left = [path for path in disk.files if path.startswith(f"{ROOT}/writing/")]
            used = self._cleaned_bytes(disk)
            if used == disk.counted_bytes and not left:
                return
            self.loop.run_until(self.loop.time() + 1.0)
        raise AssertionError(f"{used} of {disk.counted_bytes} bytes are counted, and left: {left}")

    def _cleaned_bytes(self, disk: Disk) -> int | None:
        kernel = Kernel(disk)
        with kernel.entered(), contextlib.suppress(BlockingIOError):
            directory = Directory.open(ROOT, "s3kv", disk.most_bytes)
            clean(directory)
            return directory.used_bytes()
        return None


MORE: list[Happening] = [
    (DiskFleet.request, 12),
    (DiskFleet.crash, 1.5),
    (DiskFleet.shut_down, 1),
    (DiskFleet.kill_io_process, 2),
    (DiskFleet.change_condition, 6),
    (DiskFleet.damage_file, 2),
    (DiskFleet.lose_files, 0.5),
    (DiskFleet.spoil_folder, 1),
]


class SharingDiskFleet(DiskFleet, SharingFleet):
    pass


def disk_fleet(seed: int, log: Callable[[str], None] | None = None) -> Fleet:
    """Every fourth fleet shares chunks between parallel sizes, and every fourth has tiers."""
    if seed % 4 == 1:
        return SharingDiskFleet(seed, log)
    if seed % 4 == 2:
        from tests.system.sim.tiers import TierFleet  # imports vLLM, which takes seconds

        return type("TierDiskFleet", (DiskFleet, TierFleet), {})(seed, log)
    return DiskFleet(seed, log)
