"""Copies of several KV-cache groups that alias one buffer, as vLLM lays them out: layouts, padding,
block sizes, dtypes at random. No byte changes but those of the pages and slots asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from s3kv.device.copies import BlockCopies
from s3kv.device.layout import PageLayout
from s3kv.messages import CopyPart

BLOCKS = 12
PAGE_BYTES = 512
UNIT_BYTES = 4096
DTYPES = (torch.bfloat16, torch.float32, torch.int8)


@dataclass(frozen=True)
class View:
    """How a layer sees the buffer; all of it is in elements of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    offset: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(self.dtype).as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True)
class Group:
    """held: blocks in an object of the group."""

    views: dict[str, View]
    held: int

    def layout(self, buffer: torch.Tensor) -> PageLayout:
        caches = {name: view.of(buffer) for name, view in self.views.items()}
        return PageLayout.of(caches, BLOCKS, list(caches), self.held)

    def pages(self, buffer: torch.Tensor, block: int) -> list[torch.Tensor]:
        """The pages of a block; writing to them writes to the buffer."""
        ratios = {name: view.shape[0] // BLOCKS for name, view in self.views.items()}
        return [
            view.of(buffer)[block * ratios[name] : (block + 1) * ratios[name]]
            for name, view in self.views.items()
        ]


def view_of(draw: random.Random, layer: int, layers: int, *, beside: bool) -> View:
    """beside: the layers of a block are side by side, instead of the blocks of a layer."""
    if draw.random() < 0.3:
        return state_of(draw, layer, layers, beside=beside)
    dtype = draw.choice(DTYPES)
    item = dtype.itemsize
    ratio, heads, tokens = (2 ** draw.randrange(3) for _ in range(3))
    content = 2 ** draw.randrange(1, 3)
    padding = draw.choice([0, 0, content * item])
    while ratio * (heads * tokens * content * item + padding) > PAGE_BYTES:
        tokens = max(1, tokens // 2) if tokens > 1 else tokens
        ratio = max(1, ratio // 2)
    row = PAGE_BYTES * (layers if beside else 1) // ratio // item
    if beside:
        ratio, row = 1, PAGE_BYTES * layers // item
    inner = (tokens * content, content) if draw.random() < 0.5 else (content, heads * content)
    begin = PAGE_BYTES * layer * (1 if beside else BLOCKS) // item
    return View(dtype, (BLOCKS * ratio, heads, tokens, content), (row, *inner, 1), begin)


def state_of(draw: random.Random, layer: int, layers: int, *, beside: bool) -> View:
    """A layer with states: bytes of any number, then padding up to the page of its neighbours."""
    row = PAGE_BYTES * (layers if beside else 1)
    begin = PAGE_BYTES * layer * (1 if beside else BLOCKS)
    nbytes = draw.randint(1, PAGE_BYTES)
    return View(torch.int8, (BLOCKS, 1, 1, nbytes), (row, nbytes, nbytes, 1), begin)


@pytest.mark.parametrize("seed", range(60))
def test_groups_that_alias_a_buffer_keep_to_their_pages(seed: int) -> None:
    draw = random.Random(seed)
    layers, beside = draw.randint(1, 4), draw.random() < 0.5
    generator, size = torch.Generator().manual_seed(seed), (BLOCKS * layers * PAGE_BYTES,)
    buffer = torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)
    groups = [
        Group(
            {
                f"group.{g}.layer.{n}": view_of(draw, n, layers, beside=beside)
                for n in range(draw.randint(1, layers))
            },
            draw.randint(1, 3),
        )
        for g in range(draw.randint(1, 5))
    ]
    layouts = {g: group.layout(buffer) for g, group in enumerate(groups)}
    begins, at = {}, UNIT_BYTES
    for g, layout in layouts.items():
        begins[g] = at
        at += layout.payload_bytes
    units = -(-at // UNIT_BYTES)
    slab = bytearray(b"\xa5" * (4 * units * UNIT_BYTES))
    slot = draw.randrange(3 * units)
    copies = BlockCopies.open(layouts, memoryview(slab), UNIT_BYTES, begins)
    try:
        before = buffer.clone()
        ids = list(range(1, BLOCKS))  # block 0 is nobody's
        draw.shuffle(ids)
        saved = {g: [ids.pop() for _ in range(group.held)] for g, group in _some(draw, groups)}
        for g, blocks in saved.items():
            copies.save(g, g, slot, blocks)
        assert copies.wait_all(30.0)
        assert all(end.ok for end in copies.poll().saved)
        assert torch.equal(buffer, before), f"seed {seed}: a save wrote to the cache"
        first, end = slot * UNIT_BYTES + begins[0], slot * UNIT_BYTES + at
        assert set(slab[:first]) | set(slab[end:]) <= {0xA5}, f"seed {seed}: outside the object"

        expected, parts = before.clone(), []
        free = list(range(1, BLOCKS))
        draw.shuffle(free)
        for g, blocks in saved.items():
            low = draw.randrange(len(blocks))
            targets = [free.pop() for _ in blocks[low:]]
            parts.append(CopyPart(g, slot, low, tuple(targets)))
            for source, target in zip(blocks[low:], targets, strict=True):
                pages = zip(
                    groups[g].pages(expected, target), groups[g].pages(before, source), strict=True
                )
                for page, content in pages:
                    page.copy_(content)
        copies.load("r", parts)
        assert copies.wait_all(30.0)
        assert [end.ok for end in copies.poll().loaded] == [True]
        assert torch.equal(buffer, expected), f"seed {seed}: a load wrote beside its pages"
    finally:
        copies.close()


def _some(draw: random.Random, groups: list[Group]) -> list[tuple[int, Group]]:
    """Groups whose blocks together fit the buffer."""
    chosen, left = [], BLOCKS - 1
    for g, group in enumerate(groups):
        if group.held <= left and (not chosen or draw.random() < 0.8):
            chosen.append((g, group))
            left -= group.held
    return chosen
