"""Compression or encryption with one thing done wrong: what a fleet of several forms, or one with
master keys, has to notice."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from s3kv.io.sources import ranges
from s3kv.io.sources.compressing import Compressor
from s3kv.io.sources.encrypted_store import Decryption, EncryptedStore
from s3kv.io.sources.reception import Reception
from s3kv.io.sources.staging import StagingMemory
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.objects import encryption, envelope
from s3kv.objects.compression import Codec
from s3kv.objects.encryption import EncryptedForm, MasterKey
from s3kv.objects.envelope import Envelope
from s3kv.objects.headers import Mismatch, read_header
from s3kv.objects.keys import ChunkAddress
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, Receiver
from tests.mutants import Mutants, Patch

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


form_of, get_into = MasterKey.form_of, EncryptedStore.get_into

swap(
    "binds_no_segment_to_its_number",
    encryption,
    "_associated",
    lambda number, object_bytes: object_bytes.to_bytes(16, "little"),
)


@instead_of(MasterKey, "form_of")
def leaves_the_shard_out_of_the_key(self: MasterKey, address: ChunkAddress) -> EncryptedForm:
    """But not out of the name."""
    right, wrong = (form_of(self, replace(address, shard=s)) for s in (address.shard, "whole"))
    return EncryptedForm(right.key, self.id, wrong._cipher)


@instead_of(MasterKey, "form_of")
def leaves_the_master_key_out_of_the_name(self: MasterKey, address: ChunkAddress) -> EncryptedForm:
    mark = hmac.digest(b"", address.key.block_hash, "sha256")
    name = address.key._replace(block_hash=mark)
    key = address.namespace.chunk(name, address.shard, is_encrypted=True)
    return EncryptedForm(key, self.id, form_of(self, address)._cipher)


@instead_of(EncryptedStore, "get_into")
async def looks_under_the_first_key_alone(
    self: EncryptedStore,
    key: str,
    place: Place,
    receiver: Receiver | None = None,
    first: int | None = None,
) -> ObjectInfo | None:
    forms = self._forms
    self._forms = lambda key: forms(key)[:1]  # type: ignore[assignment]
    try:
        return await get_into(self, key, place, receiver, first)
    finally:
        self._forms = forms


@instead_of(Decryption, "arrived")
def takes_what_has_arrived_for_decrypted(self: Decryption, nbytes: int) -> None:
    if self._receiver is not None and self._nbytes is not None:
        self._receiver.arrived(min(nbytes, self._nbytes))


@instead_of(StagingMemory, "lease")
@contextlib.asynccontextmanager
async def has_one_buffer_for_all_reads(
    self: Any, lengths: Sequence[int]
) -> AsyncIterator[list[memoryview]]:
    buffer = self.__dict__.setdefault("buffer", bytearray())
    if len(buffer) < max(lengths):
        buffer = self.buffer = bytearray(max(lengths))
    yield [memoryview(buffer)[:length] for length in lengths]


@instead_of(Decryption, "end")
def tells_the_length_of_what_does_not_decrypt(self: Decryption, info: ObjectInfo) -> ObjectInfo:
    """And of what arrived last, it decrypts nothing."""
    nbytes = encryption.decrypted_bytes(info.nbytes)
    return replace(info, nbytes=-1 if nbytes is None else nbytes)
