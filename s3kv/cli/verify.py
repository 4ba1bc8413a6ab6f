"""`s3kv verify`: reads objects back, and verifies them against their keys.

An object that does not verify is read a second time, because the read may have damaged it. One that
cannot be judged here does not count as damaged: it is valid for the engines it belongs to.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Literal

import click
from rich.console import Console
from rich.text import Text

from s3kv.cli import show, walk
from s3kv.cli.invocation import EPILOG, FOUND, on_bucket, print_json, with_settings
from s3kv.config import Config, count
from s3kv.objects import compression
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.envelope import Decoding, Envelope
from s3kv.objects.headers import CodecError, Mismatch, read_header
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import ChunkAddress, Namespace, all_namespaces
from s3kv.objects.manifest import leaves
from s3kv.place import Place
from s3kv.stores.lanes import in_lanes, in_turn
from s3kv.stores.s3.s3_store import MAX_PUT_BYTES
from s3kv.stores.store import ObjectInfo, ObjectStore
from s3kv.upkeep import listing

READERS = 8
"""Objects read at once; each is held in memory, and a compressed one decoded, too."""
_LARGE_BYTES = 2**30
"""Larger than most chunks. Of longer objects, one at a time is read."""

Pick = tuple[ChunkAddress, ObjectInfo]


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged object. refusal: the reason. deleted: whether it has been deleted."""

    key: str
    refusal: Mismatch
    deleted: bool = False


@dataclass(slots=True)
class Verification:
    """The result of a run. gone: objects deleted or replaced since they were listed. misread:
    objects that verified only on the second read. unjudged: by namespace, objects with another
    integrity than the settings. undecoded: compressed objects that cannot be decoded here.
    encrypted: encrypted objects, which are not read."""

    checked: int = 0
    nbytes: int = 0
    gone: int = 0
    misread: int = 0
    damaged: list[Damage] = field(default_factory=list)
    unjudged: dict[str, int] = field(default_factory=dict)
    undecoded: int = 0
    encrypted: int = 0


@click.command(epilog=EPILOG)
@click.argument("key", required=False)
@click.option(
    "--sample", "count", type=click.IntRange(1), help="Read only so many objects, chosen at random."
)
@click.option("--delete", is_flag=True, help="Delete damaged objects.")
@with_settings
def verify(config: Config, key: str | None, count: int | None, delete: bool, as_json: bool) -> None:
    """Read objects back, and list those that fail verification.

    Reads all objects, those whose keys begin with KEY, or a --sample of them, and verifies each
    against its key as an engine with these settings would; an object that does not verify is read
    twice. Namespaces with another integrity than the settings (--set integrity=…, and the secret)
    are named and left alone; encrypted objects are counted and left alone, and so are compressed
    ones if blosc2 is missing. To an engine a damaged object is a miss; after --delete it is saved
    again the next time it is computed. Reading costs money per request, and per byte if the bucket
    is in another region.
    """

    key = key and key.encode(errors="replace").decode()  # a terminal can send any bytes
    found, has_ended = Verification(), False

    async def run(store: ObjectStore) -> None:
        total = None
        if count is None:
            picks = listing.chunks(store, config.prefix, key)
        else:
            picked = await sample(store, config.prefix, count, random.Random(), key)
            picks, total = in_turn(picked), len(picked)
        with show.bars() as on_progress:
            await Verifier(
                store, config, found, delete, lambda n: on_progress("verifying", n, total)
            ).run(picks)
        if found == Verification() and key is None:
            await walk.report_empty(store, config.bucket, config.prefix)

    try:
        on_bucket(config, run)
        has_ended = True
    finally:
        is_empty = found == Verification()
        is_missing = key is not None and is_empty
        if as_json and (has_ended or not is_empty):
            print_json(asdict(found))
        elif not is_empty or (has_ended and not is_missing):
            _print(found)
    if is_missing:
        start = f"; all begin with {all_namespaces(config.prefix)!r}"
        click.echo(f"s3kv: no chunk has a key that begins with {key!r}{start}", err=True)
    is_bad = found.damaged or found.unjudged or found.undecoded or is_missing
    raise SystemExit(FOUND if is_bad else 0)


async def sample(
    store: ObjectStore, prefix: str, count: int, rng: random.Random, under: str | None = None
) -> list[Pick]:
    """A sample of `count` chunks in key order, each as likely as any other (Vitter's algorithm R);
    all chunks if there are fewer. under: as for `listing.chunks`. Raises `StoreError`."""
    picked: list[Pick] = []
    seen = 0
    async for pick in listing.chunks(store, prefix, under):
        seen += 1
        if len(picked) < count:
            picked.append(pick)
        elif (place := rng.randrange(seen)) < count:
            picked[place] = pick
    return sorted(picked, key=lambda pick: pick[1].key)


@dataclass(slots=True)
class Verifier:
    """Verifies objects as an engine with the settings of `config` would. Belongs to one loop.

    found: receives the results, also those of a run that breaks off. delete: delete a damaged
    object, if it is still the one listed.
    """

    store: ObjectStore
    config: Config
    found: Verification
    delete: bool = False
    on_object: Callable[[int], None] = lambda checked: None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _judging: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _judged: dict[Namespace, bool] = field(default_factory=dict, init=False)

    async def run(self, picks: AsyncIterator[Pick]) -> None:
        """Verify the objects. Raises `StoreError`; raises `ConfigError` if the settings need a
        secret that is not there."""
        try:
            await in_lanes(READERS, picks, self._verify)
        finally:
            self.found.damaged.sort(key=lambda damage: damage.key)

    async def _verify(self, _: int, pick: Pick) -> None:
        address, info = pick
        if address.is_encrypted:
            self.found.encrypted += 1
            return
        refusal: Mismatch | Literal["gone"] | None = "algorithm"
        if await self._can_judge(address.namespace):
            async with self._reading if info.nbytes > _LARGE_BYTES else nullcontext():
                refusal = await self._refusal(address, info)
                if refusal not in (None, "gone", "algorithm", "codec"):
                    refusal = await self._refusal(address, info)
                    self.found.misread += refusal is None
        if refusal == "algorithm":
            digest = address.namespace.digest
            self.found.unjudged[digest] = self.found.unjudged.get(digest, 0) + 1
        elif refusal == "codec":
            self.found.undecoded += 1
        elif refusal == "gone":
            self.found.gone += 1
        else:
            self.found.checked += 1
            self.found.nbytes += info.nbytes
            if refusal is not None:
                deleted = self.delete and await listing.tried(
                    lambda: self.store.delete(info.key, if_etag=info.etag)
                )
                self.found.damaged.append(Damage(info.key, refusal, deleted))
            self.on_object(self.found.checked)

    async def _refusal(
        self, address: ChunkAddress, info: ObjectInfo
    ) -> Mismatch | Literal["gone"] | None:
        """The reason why a listed object is not valid; "gone": deleted or replaced since."""
        if info.nbytes > MAX_PUT_BYTES:
            return "length"
        buffer = memoryview(bytearray(info.nbytes))
        came = await listing.tried(lambda: self.store.get_into(info.key, Place.of(buffer)))
        if came is None or came.nbytes != info.nbytes:
            return "gone"
        return refusal_of(self.config, address, buffer)

    async def _can_judge(self, namespace: Namespace) -> bool:
        """Whether the manifest has the integrity (mode and key) of the settings. Without one, True
        unless the mode needs a secret: with a wrong secret everything looks forged."""
        async with self._judging:
            if namespace not in self._judged:
                ours = Integrity.of(self.config).identity()
                if manifest := (await walk.describe(self.store, namespace)).manifest:
                    wanted = leaves(json.dumps({"integrity": ours}).encode()) or {}
                    said = {n: v for n, v in manifest.items() if n.startswith("integrity")}
                    self._judged[namespace] = said == wanted
                else:
                    self._judged[namespace] = ours["mode"] != "blake3-keyed"
            return self._judged[namespace]


def refusal_of(config: Config, address: ChunkAddress, buffer: memoryview) -> Mismatch | None:
    """The reason why the object in `buffer` is not the one its key names; None if it is. Verifies
    as an engine with these settings would, except that the tensors, which an engine takes from its
    model, are the header's. Raises `ConfigError` if the settings need a secret that is missing."""
    integrity = Integrity.of(config)
    try:
        header = read_header(buffer)
        if sum(tensor.nbytes for tensor in header.tensors) > MAX_PUT_BYTES:
            return "length"
        digest, group = address.namespace.digest, address.key.group
        expected = ChunkFormat(
            digest, header.tensors, group, address.shard, integrity, header.first_block
        )
    except CodecError as error:
        return error.refusal
    except ValueError:
        return "header"
    if header.codec:
        return _compressed_refusal(expected, buffer, address.key.block_hash)
    place = Place.of(buffer, expected.header_bytes)
    return expected.check(place, len(buffer), address.key.block_hash)


def _compressed_refusal(
    expected: ChunkFormat, buffer: memoryview, block_hash: bytes
) -> Mismatch | None:
    envelope = Envelope.of(expected)
    if envelope is None or len(buffer) >= expected.object_bytes:
        return "length"
    header = Decoding(envelope, Place.of(buffer), len(buffer), block_hash, compression.codec())
    header.advance(header.wanted_bytes)  # before memory is taken for the tensors that it names
    if header.reason is not None:
        return header.reason
    place = Place.of(bytearray(expected.object_bytes), expected.header_bytes)
    decoding = Decoding(envelope, place, len(buffer), block_hash, compression.codec())
    decoding.place_of(range(len(buffer))).write(buffer)
    decoding.advance(len(buffer))
    return decoding.reason


def _print(found: Verification) -> None:
    console = Console(soft_wrap=True)
    for damage in found.damaged:
        what = Text(f"{damage.refusal:<10}", "bold red")
        console.print(what.append(f"  {damage.key}{'  (deleted)' if damage.deleted else ''}", ""))
    for digest, objects in found.unjudged.items():
        told = f"{count(objects, 'object')} cannot be judged with these settings"
        console.print(Text(f"namespace {digest}: {told}", "yellow"))
        console.print("→ give --set integrity=… as set in its engines, and their secret")
    if found.undecoded:
        told = f"{count(found.undecoded, 'compressed object')} cannot be judged without blosc2"
        console.print(Text(told, "yellow"))
        console.print(f"→ {compression.REMEDY}", markup=False)
    if found.encrypted:
        told = "not read: it takes a prompt to open it"
        console.print(Text(f"{count(found.encrypted, 'encrypted object')} {told}"))
    told = f"{count(found.checked, 'object')} ({show.size(found.nbytes)}) read, "
    told += f"{len(found.damaged):,} damaged"
    if found.misread:
        told += f", {found.misread:,} right only when read twice"
    if found.gone:
        told += f", {found.gone:,} gone or replaced meanwhile"
    console.print(Text(told))
