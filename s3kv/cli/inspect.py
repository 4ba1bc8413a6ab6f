"""`s3kv inspect`: reads one object, and verifies it against its key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import click
from rich.text import Text

from s3kv.cli import show
from s3kv.cli.invocation import EPILOG, FOUND, on_bucket, print_json, with_settings
from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.objects import keys
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.headers import CodecError, Header, Mismatch, read_header
from s3kv.objects.integrity import Integrity
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, ObjectStore
from s3kv.upkeep.listing import tried

MAX_OBJECT_BYTES = 2**30
"""Larger than any chunk; the most that somebody's object makes this process allocate."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """The findings on one object. header: None if none can be read. refusal: the reason why the
    object is not the one its key names; None if it is."""

    key: str
    nbytes: int
    header: Header | None
    refusal: Mismatch | None


@click.command(epilog=EPILOG)
@click.argument("key")
@with_settings
def inspect(config: Config, key: str, as_json: bool) -> None:
    """Show the header of the object KEY, and verify the object.

    Reads the whole object and verifies it against its key as an engine with these settings would:
    namespace, coverage, shard, block hash, length and digest. Set integrity (--set) as the engines
    have it, and for blake3-keyed give the secret; for none no digest is verified.
    """
    found = on_bucket(config, lambda store: look_at(store, config, key))
    if found is None:
        click.echo(f"s3kv: there is no object {key!r} in {config.bucket!r}", err=True)
        raise SystemExit(FOUND)
    if as_json:
        document = dataclasses.asdict(found)
        if found.header is not None:
            document["header"]["block_hash"] = found.header.block_hash.hex()
        print_json(document)
    else:
        _print(found)
    raise SystemExit(0 if found.refusal is None else FOUND)


async def look_at(store: ObjectStore, config: Config, key: str) -> Inspection | None:
    """Read the object and verify it against its key. Returns None if there is no such object.

    Verifies as an engine with these settings would; only the tensors, which an engine takes from
    its model, are those of the header. Raises `ConfigError` if `key` is not that of a chunk, or
    if the settings need a secret that is not there; `StoreError` if the bucket cannot be asked.
    """
    address = keys.parse(key)
    if address is None:
        raise ConfigError(
            f"KEY is {key!r}: allowed is the key of a chunk, which looks like "
            f"{config.prefix}/{keys.LAYOUT}/NAMESPACE/HH/HASH/gCOVERAGE-SHARD.safetensors"
        )
    while (info := await store.head(key)) is not None:
        found = await read_back(store, config, address, info)
        if found is not None:  # or it was replaced between the two requests
            return found
    return None


async def read_back(
    store: ObjectStore, config: Config, address: keys.ChunkAddress, info: ObjectInfo
) -> Inspection | None:
    """Read an object that was listed or looked at, and verify it. Returns None if it is gone, or
    has another length by now. Raises `ConfigError` as `look_at` does, and `StoreError`."""
    if info.nbytes > MAX_OBJECT_BYTES:
        return Inspection(info.key, info.nbytes, None, "length")
    buffer = memoryview(bytearray(info.nbytes))
    came = await tried(lambda: store.get_into(info.key, Place.of(buffer)))
    if came is None or came.nbytes != info.nbytes:
        return None
    return examine(config, address, info.key, buffer)


def examine(config: Config, address: keys.ChunkAddress, key: str, buffer: memoryview) -> Inspection:
    """Verify the whole object in `buffer`. Raises `ConfigError` as `look_at` does."""
    nbytes = len(buffer)
    integrity = Integrity.of(config)
    try:
        header = read_header(buffer)
        expected = ChunkFormat(
            address.namespace.digest,
            header.tensors,
            address.key.group,
            address.shard,
            integrity,
            header.first_block,
        )
    except CodecError as error:
        return Inspection(key, nbytes, None, error.refusal)
    except ValueError:
        return Inspection(key, nbytes, None, "header")
    place = Place.of(buffer, expected.header_bytes)
    refusal = expected.check(place, nbytes, address.key.block_hash)
    return Inspection(key, nbytes, header, refusal)


def _print(found: Inspection) -> None:
    rows: list[tuple[str, show.Cell]] = [("key", found.key), ("bytes", f"{found.nbytes:,}")]
    header = found.header
    if header is not None:
        rows += [
            ("namespace", header.namespace_digest),
            ("coverage, shard", f"{header.coverage}, {header.shard}"),
            ("block hash", header.block_hash.hex()),
            ("digests", f"{header.algorithm} {', '.join(header.digests)}"),
        ]
        for part in header.tensors:
            rows.append(("tensor", f"{part.name}  {part.dtype} {list(part.shape)}"))
            rows += [
                ("layer", f"{t.name}  {t.dtype} {list(t.shape)} {t.order}") for t in part.layers
            ]
    if found.refusal is None:
        verdict = Text("the object matches its key", "green")
    else:
        verdict = Text(f"refused: {found.refusal}. To an engine it is a miss", "bold red")
        if found.refusal == "algorithm":
            verdict.append("\n→ give --set integrity=… as set in the engines of this namespace")
    show.print_grid([*rows, ("verdict", verdict)])
