"""Compression with one thing done wrong: what a fleet of several forms has to notice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from s3kv.io.sources import ranges
from s3kv.io.sources.compressing import Compressor
from s3kv.io.sources.reception import Reception
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.objects import envelope
from s3kv.objects.compression import Codec
from s3kv.objects.envelope import Envelope
from s3kv.objects.headers import Mismatch, read_header
from s3kv.place import Place
from tests.system.sim.mutants import Mutants, Patch

MUTANTS = Mutants()
mutant, instead_of, swap = MUTANTS.mutant, MUTANTS.instead_of, MUTANTS.swap

check, land, progress = Reception.check, Reception.land, Reception.progress
encode, listed = Envelope.encode, Envelope.listed


@mutant
def believes_every_compressed_object_of_the_right_length(patch: Patch) -> None:
    believing = SimpleNamespace(compare_digest=lambda one, other: True)
    patch.setattr(envelope, "hmac", believing)
    patch.setattr(envelope, "_decoded_digest", lambda segment: b"0" * 16)


@instead_of(Reception, "stop")
async def goes_on_decoding_after_the_job(self: Reception) -> None:
    """The slot is another chunk's by then."""


@mutant
def takes_the_ranges_of_two_objects_for_one(patch: Patch) -> None:
    def land_anything(self: Reception, nbytes: int, bounds: range | None = None) -> Place | None:
        return land(self, nbytes if self._nbytes is None else self._nbytes, bounds)

    patch.setattr(Reception, "land", land_anything)
    patch.setattr(ranges, "_is_part", lambda whole, bounds, part: True)


@instead_of(Reception, "check")
async def takes_a_missing_codec_for_a_bad_object(self: Reception, nbytes: int) -> Mismatch | None:
    reason = await check(self, nbytes)
    return "header" if reason == "codec" else reason


@instead_of(Reception, "progress")
def decodes_what_has_not_arrived(self: Reception, nbytes: int) -> None:
    progress(self, nbytes if nbytes < 4096 else self._nbytes or nbytes)


@instead_of(Compressor, "_encode")
async def sends_what_is_plain_while_it_encodes_on(
    self: Compressor, job: TransferJob, form: Envelope, codec: Codec, buffer: bytearray
) -> int:
    assert self._executor is not None
    self._executor.submit(encode, form, job.place, job.block_hash, codec, lambda: False)
    return 0


@instead_of(Envelope, "listed")
def believes_every_header(self: Envelope, header: bytes, block_hash: bytes, nbytes: int) -> Any:
    """Of this format, and of whatever chunk."""
    try:
        said = read_header(memoryview(header), object_bytes=nbytes)
    except ValueError:
        return None
    return listed(self, header, said.block_hash, nbytes)
