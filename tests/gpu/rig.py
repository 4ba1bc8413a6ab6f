"""Caches, a slab of any number of slots, and copies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from s3kv.device.copier import Copier
from s3kv.device.copies import BlockCopies
from s3kv.device.slot_payloads import ChunkPlaces
from tests.gpu.engine import LONG_S
from tests.unit.device.caches import Caches, Shape, build, places
from tests.unit.device.devices import Device


@dataclass
class Rig:
    device: Device
    caches: Caches
    places: ChunkPlaces
    header_bytes: int
    copies: BlockCopies

    def write(self, content: Sequence[torch.Tensor]) -> Callable[[], object]:
        """Of all memory, for the engine to launch."""
        pairs = list(zip(self.caches.buffers, content, strict=True))
        return lambda: [buffer.copy_(data) for buffer, data in pairs]

    def payload(self, slot: int) -> bytes:
        begin = slot * self.places.slot_bytes + self.header_bytes
        payload = self.places.memory[begin : begin + self.caches.layout().payload_bytes]
        return payload.numpy().tobytes()

    def finish(self) -> None:
        """Wait for all copies, which have to end well."""
        self.device.go_on()
        assert self.copies.wait_all(LONG_S)
        ends = self.copies.poll()
        assert all(end.ok for end in (*ends.saved, *ends.loaded))


def fill(caches: Caches, block_ids: Sequence[int], value: int) -> None:
    """Every byte of these blocks."""
    for view in caches.views.values():
        for row in caches.rows(block_ids):
            view.view(torch.uint8)[row].fill_(value)


def noise(caches: Caches, generator: torch.Generator) -> list[torch.Tensor]:
    """New content for all memory, where the caches are."""
    return [
        torch.randint(0, 256, b.shape, dtype=torch.uint8, generator=generator).to(b.device)
        for b in caches.buffers
    ]


def with_content(caches: Caches, content: Sequence[torch.Tensor]) -> Caches:
    """The same layout with this content, on the CPU."""
    other = caches.clone()
    for buffer, data in zip(other.buffers, content, strict=True):
        buffer.copy_(data)
    return other


@contextmanager
def rig(
    device: Device,
    shape: Shape,
    slots: int,
    open_copier: Callable[[ChunkPlaces], Copier] | None = None,
) -> Iterator[Rig]:
    caches = build(shape, device.memory, torch.Generator().manual_seed(device.seed % 2**31))
    where, form = places(caches, slots)
    copies = BlockCopies((open_copier or device.open)(where))
    try:
        yield Rig(device, caches, where, form.header_bytes, copies)
    finally:
        copies.close()
