"""The directory of `disk_path` as an inventory, for the commands that take `--disk`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Any

import click

from s3kv.cli.invocation import on_bucket
from s3kv.config import Config
from s3kv.errors import ConfigError, StoreUnavailable
from s3kv.objects.keys import LAYOUT, all_namespaces
from s3kv.place import Place
from s3kv.stores.disk import Directory
from s3kv.stores.store import Inventory, ObjectInfo, Receiver

disk_option = click.option(
    "--disk",
    type=click.Path(),
    help="Directory of disk_path, instead of a bucket; ages are times since the last use.",
)


class DiskInventory:
    """`Inventory` of a directory. The last write of an object is the last use of its file. Methods
    block the loop, and raise `OSError`."""

    def __init__(self, directory: Directory, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None
    ) -> ObjectInfo | None:
        return None  # only manifests are read, and those are only in the bucket

    async def head(self, key: str) -> ObjectInfo | None:
        try:
            status = os.lstat(self._directory.file_of(key))
        except FileNotFoundError:
            return None
        return ObjectInfo(key, status.st_size, status.st_mtime)

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        for info in objects:
            self._directory.delete(self._directory.file_of(info.key))
        return ()

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        for file in self._directory.files():
            key = self._directory.key_of(file.path)
            if key.startswith(prefix):
                yield ObjectInfo(key, file.nbytes, file.used_s)

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        if prefix != all_namespaces(self._prefix):
            return ()
        found = os.scandir(self._directory.path / LAYOUT)
        return sorted(entry.name for entry in found if entry.is_dir())[:limit]


def on_bucket_or_disk(
    config: Config,
    disk: str | None,
    work: Callable[[Inventory], Coroutine[Any, Any, None]],
    *,
    deletes: bool = False,
) -> None:
    """Run `work` on the bucket, or on the directory `disk`. deletes: take the role of the one
    process that deletes files of the directory.

    Raises as `on_bucket` does; `ConfigError` if there is no such directory, or this user cannot use
    it; and `StoreUnavailable` if another process has that role.
    """
    if disk is None:
        return on_bucket(config, work)
    if not os.path.isdir(os.path.join(disk, LAYOUT)):
        raise ConfigError(f"--disk is {disk!r}: allowed is a directory with files of s3kv")
    directory = Directory.open(disk, config.prefix, 0)
    with directory.cleaning() if deletes else nullcontext(True) as is_mine:
        if not is_mine:
            raise StoreUnavailable(f"an engine is deleting files in {disk!r} now: try again later")
        asyncio.run(work(DiskInventory(directory, config.prefix)))
