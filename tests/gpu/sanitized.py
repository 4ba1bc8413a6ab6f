"""A few copies of every kind, small enough to run under compute-sanitizer:
`python -m tests.gpu.sanitized [--kind cuda …] [--mib 4] [--large] [--seconds 60]`. Ends with
1 where a byte is wrong.

--kind: of device, as in `tests.unit.device.devices`; a GPU if none is given.
--mib: of the caches. Large ones do not fit into one piece of an allocator's.
--large: chunks of the many pieces that real models have instead, too many for a sanitizer.
--seconds: begin again, with other pages and bytes, until so many have passed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import count, product
from time import monotonic

import torch

from s3kv.messages import CopyPart
from tests.gpu.rig import noise, rig, with_content
from tests.unit.device.caches import Shape, peek
from tests.unit.device.devices import KINDS, make_device

SHAPES = (
    Shape("LBNHC", layers=3, tokens=16, content=64, heads=2, blocks_per_chunk=4),
    Shape("LHBNC", layers=2, tokens=16, content=64, heads=2, blocks_per_chunk=3),
    Shape("BLNHC", layers=3, tokens=4, content=6, heads=1, pad=1, lead=1, blocks_per_chunk=2),
)
LARGE = (
    # A rank of a 70B model at TP 8, with heads of half their width: 1,280 pieces of 8 KiB.
    Shape("LBNHC", layers=80, tokens=16, content=256, heads=1, blocks=49, blocks_per_chunk=16),
    # Heads outermost: 4,352 pieces of 2 KiB.
    Shape("LHBNC", layers=32, tokens=16, content=64, heads=8, blocks=52, blocks_per_chunk=17),
)
PAGE_BYTES = 16 * 2 * 64 * 2
SLOTS = 3


def sized(shape: Shape, mib: int) -> Shape:
    blocks = max(3 * shape.blocks_per_chunk, mib * 2**20 // (shape.layers * PAGE_BYTES))
    return Shape(**{**vars(shape), "blocks": blocks})


def saved_and_loaded(kind: str, shape: Shape, seed: int) -> bool:
    """Whether chunks of random pages, from all over the caches, were saved and came back."""
    generator = torch.Generator().manual_seed(seed)
    device = make_device(kind, seed)
    with rig(device, shape, SLOTS) as r:
        content = noise(r.caches, generator)
        count = shape.blocks_per_chunk
        chunks = torch.randperm(shape.blocks, generator=generator)[: 3 * count].tolist()
        last = [shape.blocks - 1, *chunks][:count]
        sources = [chunks[:count], last, chunks[count : 2 * count]]
        device.synchronize()
        device.launch(r.write(content))
        for job, blocks in enumerate(sources):
            r.copies.save(job, 0, job, blocks)
        r.copies.fence(range(SLOTS))
        device.launch(lambda: [buffer.zero_() for buffer in r.caches.buffers])
        r.finish()
        before = with_content(r.caches, content)
        for job, blocks in enumerate(sources):
            r.copies.load(str(job), [CopyPart(0, job, 0, tuple(blocks))])
        r.finish()
        device.synchronize()
        for job, blocks in enumerate(sources):
            expected, found = before.content(blocks), r.caches.content(blocks)
            if r.payload(job) != peek(before.layout(), blocks):
                return False
            if any(not torch.equal(expected[name], found[name]) for name in expected):
                return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--mib", type=int, default=0)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--seconds", type=float, default=0)
    options = parser.parse_args(arguments)
    kinds = options.kind or ("cuda",)
    shapes = LARGE if options.large else [sized(shape, options.mib) for shape in SHAPES]
    end_s = monotonic() + options.seconds
    for seed in count():
        for kind, shape in product(kinds, shapes):
            if not saved_and_loaded(kind, shape, seed):
                print(f"{kind}: wrong bytes, seed {seed}, {shape}", file=sys.stderr)
                return 1
        if monotonic() >= end_s:
            print(f"{', '.join(kinds)}: {len(shapes)} shapes, {seed + 1} times, all bytes right")
            return 0
    raise AssertionError("numbers have no end")


if __name__ == "__main__":
    sys.exit(main())
