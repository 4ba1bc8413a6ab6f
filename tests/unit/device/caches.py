"""KV caches as vLLM registers them, in every physical layout, and the slow way to look at them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.objects.codec import ChunkFormat

ORDERS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True)
class Shape:
    """sizes: by letter, B counts blocks (of `ratio` rows each). pad: items after each page, or
    after each head's share of it where the heads are outside. lead: items before the first page.
    separate: a buffer for each layer instead of one for all. shared: a last layer with the memory
    of the first.
    """

    order: str
    layers: int = 2
    blocks: int = 6
    heads: int = 2
    tokens: int = 4
    content: int = 8
    ratio: int = 1
    dtype: torch.dtype = torch.bfloat16
    pad: int = 0
    lead: int = 0
    separate: bool = False
    shared: bool = False
    blocks_per_chunk: int = 2


@dataclass(frozen=True)
class Caches:
    shape: Shape
    buffers: tuple[torch.Tensor, ...]
    """All memory there is, flat bytes; also what lies around the caches."""
    views: dict[str, torch.Tensor]
    """[B * ratio, H, N, C] by layer name, what vLLM hands over."""

    def layout(self) -> PageLayout:
        shape = self.shape
        return PageLayout.of(self.views, shape.blocks, tuple(self.views), shape.blocks_per_chunk)

    def rows(self, block_ids: Sequence[int]) -> list[int]:
        ratio = self.shape.ratio
        return [block * ratio + row for block in block_ids for row in range(ratio)]

    def content(self, block_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """The logical content of blocks by layer, on the CPU, a row of bytes for each cache row."""
        return {
            name: raw(view[self.rows(block_ids)].cpu().clone()) for name, view in self.views.items()
        }

    def write(self, block_ids: Sequence[int], content: dict[str, torch.Tensor]) -> None:
        for name, view in self.views.items():
            for row, data in zip(self.rows(block_ids), content[name], strict=True):
                view[row] = data.clone().view(view.dtype).view(view.shape[1:])

    def memory(self) -> list[bytes]:
        return [buffer.cpu().numpy().tobytes() for buffer in self.buffers]

    def clone(self) -> Caches:
        """The same layout over a copy of the memory, on the CPU."""
        buffers = tuple(buffer.cpu().clone() for buffer in self.buffers)
        return replace(self, buffers=buffers, views=_views(self.shape, buffers))

    def fill(self, generator: torch.Generator) -> None:
        for buffer in self.buffers:
            noise = torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=generator)
            buffer.copy_(noise)


def build(shape: Shape, device: str = "cpu", generator: torch.Generator | None = None) -> Caches:
    """Caches over memory filled with noise, the same noise if no generator is given."""
    _, items = _strides(shape)
    nbytes = (shape.lead + items + 5) * shape.dtype.itemsize
    count = shape.layers if shape.separate else 1
    buffers = tuple(torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count))
    caches = Caches(shape, buffers, _views(shape, buffers))
    caches.fill(generator or torch.Generator().manual_seed(3))
    return caches


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical order, as a row of bytes for each entry of the first dimension."""
    return tensor.contiguous().flatten().view(torch.uint8).view(tensor.shape[0], -1)


class Move(NamedTuple):
    """A run of `nbytes` at a device address that is contiguous in the payload, too, at `offset`."""

    address: int
    offset: int
    nbytes: int


def moves(layout: PageLayout, block_ids: Sequence[int], first_block: int) -> list[Move]:
    """The copies that make up blocks `first_block …` of a chunk, one by one from the layers."""
    found: list[Move] = []
    at = first_block * layout.block_bytes
    for block in block_ids:
        for layer in layout.layers:
            begin = layer.address + block * layer.block_stride_bytes
            for offset, nbytes in layer.runs:
                last = found[-1] if found else Move(0, 0, 0)
                if last.address + last.nbytes == begin + offset:
                    found[-1] = last._replace(nbytes=last.nbytes + nbytes)
                else:
                    found.append(Move(begin + offset, at, nbytes))
                at += nbytes
    return found


def peek(layout: PageLayout, block_ids: Sequence[int]) -> bytes:
    """The blocks as a payload has them, of caches on the CPU."""
    return b"".join(ctypes.string_at(m.address, m.nbytes) for m in moves(layout, block_ids, 0))


def places(caches: Caches, slots: int = 3) -> tuple[ChunkPlaces, ChunkFormat]:
    """A slab for group 0, every byte of which is 0xA5."""
    layout = caches.layout()
    form = ChunkFormat("0" * 32, (layout.part("g0"),), 0, "h0-7of8-l0-31of32")
    slot_bytes = -(-form.object_bytes // 4096) * 4096
    slab = memoryview(mmap.mmap(-1, slots * slot_bytes))
    slab[:] = b"\xa5" * len(slab)
    return ChunkPlaces({0: layout}, slab, slot_bytes, {0: form.header_bytes}), form


def _strides(shape: Shape) -> tuple[dict[str, int], int]:
    """Strides in items by letter, and the items they span."""
    sizes = {
        "L": 1 if shape.separate else shape.layers,
        "B": shape.blocks * shape.ratio,
        "H": shape.heads,
        "N": shape.tokens,
        "C": shape.content,
    }
    grid_end = max(shape.order.index("L"), shape.order.index("B"))
    strides: dict[str, int] = {}
    reach = 1
    for at in range(4, -1, -1):
        letter = shape.order[at]
        reach += shape.pad if at == grid_end else 0
        strides[letter] = reach
        reach *= sizes[letter]
    return strides, reach


def _views(shape: Shape, buffers: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    strides, _ = _strides(shape)
    size = (shape.blocks * shape.ratio, shape.heads, shape.tokens, shape.content)
    views = {}
    for layer in range(shape.layers):
        buffer = buffers[layer if shape.separate else 0]
        begin = shape.lead + (0 if shape.separate else layer * strides["L"])
        views[f"layer.{layer}"] = torch.as_strided(
            buffer.view(shape.dtype), size, tuple(strides[d] for d in "BHNC"), begin
        )
    if shape.shared:
        views["shared"] = views["layer.0"]
    return views
