"""Encryption with one thing done wrong: what a fleet with master keys has to notice."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from s3kv.io.sources.encrypted_store import Decryption, EncryptedStore
from s3kv.io.sources.staging import StagingMemory
from s3kv.objects import encryption
from s3kv.objects.encryption import EncryptedForm, MasterKey
from s3kv.objects.keys import ChunkAddress
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, Receiver
from tests.system.sim.mutants import Mutants

MUTANTS = Mutants()
instead_of, swap = MUTANTS.instead_of, MUTANTS.swap

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
