"""What a killed process may have left: other processes, shared memory, objects in the bucket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lab.s3 import S3Server
from s3kv.objects import keys
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.headers import read_header
from s3kv.objects.keys import ChunkAddress
from s3kv.place import Place
from tests.system.forms import plain_of

_SLAB = "/memfd:s3kv-slab"


def processes_marked(marker: str) -> list[int]:
    """Living processes that have `marker` in the environment they were started with."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and marker.encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))
    return sorted(found)


def slabs(pids: list[int] | None = None) -> set[int]:
    """Inodes of the slabs that these processes hold; all processes unless told."""
    found = set()
    directories = (
        Path("/proc").glob("[0-9]*") if pids is None else [Path(f"/proc/{p}") for p in pids]
    )
    for directory in directories:
        for entry in _entries(directory / "fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith(_SLAB):
                    found.add(os.stat(entry).st_ino)
    return found


def _entries(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from directory.iterdir()


def shared_files(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    found.add(line[line.index("/dev/shm/") :])
    return found


def check_objects(
    s3: S3Server,
    bucket: str,
    check: Callable[[ChunkAddress, memoryview], None] = lambda address, payload: None,
    decrypt: Callable[[str, bytes], tuple[str, bytes]] = lambda name, data: (name, data),
) -> int:
    """Every object is whole, and what its key says. Returns how many there are.

    check: looks at the payloads. decrypt: the key and the bytes of the object inside of an
    encrypted one, and any other as it is.
    """
    count = 0
    for stored in s3.contents(bucket).items():
        name, data = decrypt(*stored)
        address = keys.parse(name)
        if address is None:
            continue
        body = memoryview(plain_of(data))
        layout = ChunkFormat(
            address.namespace.digest, read_header(body).tensors, address.key.group, address.shard
        )
        refusal = layout.check(
            Place.of(body, layout.header_bytes), len(body), address.key.block_hash
        )
        assert refusal is None, f"{name}, {len(data)} bytes: {refusal}"
        check(address, body[layout.header_bytes :])
        count += 1
    return count
