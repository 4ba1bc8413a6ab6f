"""Arithmetic behind object format 2: bytes, requests and copy descriptors of real models' chunks.

    python -m benchmarks.object_format

Nothing is measured: model shapes go in, a table comes out. Decision 15 quotes it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from math import ceil

from rich.console import Console
from rich.table import Table

from benchmarks.deadline import ends

MIB = 2**20
RESUME_TOKENS = 32_768
SEGMENT_BYTES = 8 * MIB


@dataclass(frozen=True)
class Group:
    """One KV-cache group on one rank. A state group has `state_bytes` per layer, and no tokens."""

    kind: str
    count: int
    layers: int
    heads: int = 0
    content_bytes: int = 0
    """Key and value of one token and head."""
    window_tokens: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class Model:
    name: str
    chunk_tokens: int
    block_tokens: int
    groups: tuple[Group, ...]


MODELS = (
    Model("Llama 3 8B, TP=1", 256, 16, (Group("full", 1, 32, 8, 512),)),
    Model("Llama 3 70B, TP=8", 256, 16, (Group("full", 1, 80, 1, 512),)),
    # 62 layers, one in six with full attention; vLLM pads the groups to equal layers.
    Model(
        "Gemma 3 27B, TP=1",
        256,
        16,
        (Group("full", 1, 10, 16, 512), Group("window", 6, 10, 16, 512, window_tokens=1024)),
    ),
    Model(
        "gpt-oss 20B, TP=1",
        256,
        16,
        (Group("full", 1, 12, 8, 256), Group("window", 1, 12, 8, 256, window_tokens=128)),
    ),
    # 48 layers: 12 with full attention, 36 Gated DeltaNet. A state is 32 heads of 128 x 128 and the
    # last three inputs of a convolution over 8,192 channels, bfloat16; a block of attention is made
    # as large as a state.
    Model(
        "Qwen3-Next 80B, TP=1",
        544,
        544,
        (Group("full", 1, 12, 2, 1024), Group("state", 3, 12, state_bytes=32 * 128**2 * 2 + 49152)),
    ),
)


def object_tokens(model: Model, group: Group) -> int:
    """Tokens whose pages one chunk's object holds: of a window, those a resume can need."""
    if group.kind != "window":
        return model.chunk_tokens
    blocks = ceil((group.window_tokens - 1) / model.block_tokens) + 1
    return min(model.chunk_tokens, blocks * model.block_tokens)


def object_bytes(model: Model, group: Group) -> int:
    if group.kind == "state":
        return group.layers * group.state_bytes
    return object_tokens(model, group) * group.layers * group.heads * group.content_bytes


def resume_gets(model: Model, group: Group) -> int:
    """Objects of one group that a resume at `RESUME_TOKENS` reads."""
    whole = RESUME_TOKENS // model.chunk_tokens
    if group.kind == "full":
        return whole
    if group.kind == "state":
        return 1
    return min(whole, ceil((group.window_tokens - 1) / model.chunk_tokens))


def pieces(model: Model, group: Group, order: str, shards: int) -> tuple[int, int]:
    """Contiguous runs of a copy between a chunk and blocks that are not neighbours, and the bytes
    of one. order: format 1, or format 2 on a device layout; shards: of one rank's heads.
    """
    nbytes = object_bytes(model, group)
    if group.kind == "state":
        count = group.layers
    else:
        blocks = object_tokens(model, group) // model.block_tokens
        count = blocks * (group.layers if order != "2 on BLHNC" or shards > 1 else 1) * shards
    return count, nbytes // count


def rows() -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    for model in MODELS:
        for group in model.groups:
            nbytes = object_bytes(model, group)
            shards = {n for n in (1, 2, 8) if group.heads and group.heads % n == 0} or {1}
            out.append(
                {
                    "model": model.name,
                    "group": f"{group.count} x {group.kind}",
                    "MiB per object": round(nbytes / MIB, 1),
                    "segments": ceil(nbytes / SEGMENT_BYTES),
                    "PUTs per 1,000 tokens": round(group.count * 1000 / model.chunk_tokens, 1),
                    "GETs to resume": group.count * resume_gets(model, group),
                    "MiB to resume": round(group.count * resume_gets(model, group) * nbytes / MIB),
                    "format 1": _text(pieces(model, group, "1", 1)),
                    **{
                        f"format 2, {n} shard{'s' * (n > 1)}": _text(
                            pieces(model, group, "2 on BLHNC", n)
                        )
                        if n in shards
                        else ""
                        for n in (1, 2, 8)
                    },
                }
            )
    return out


def _text(runs: tuple[int, int]) -> str:
    count, nbytes = runs
    return f"{count:,} of {nbytes / 1024:,.0f} KiB"


@dataclass(frozen=True)
class Sharing:
    """Requests per chunk when a fleet of `writers` ranks stores and `readers` ranks read."""

    writers: int
    readers: int
    heads: int = 8

    def per_rank(self) -> tuple[int, int]:
        """An object per writing rank: PUTs, and GETs of all readers. A reader of a part of an
        object asks for the header and for its range.
        """
        if self.readers > self.writers:
            return self.writers, 2 * self.readers
        return self.writers, self.writers

    def per_head(self) -> tuple[int, int]:
        return self.heads, self.heads


def sharing_rows() -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    for writers in (1, 2, 4, 8):
        for readers in (1, 2, 4, 8):
            s = Sharing(writers, readers)
            out.append(
                {
                    "stored at TP": writers,
                    "read at TP": readers,
                    "object per rank: PUT, GET": "{}, {}".format(*s.per_rank()),
                    "object per KV head: PUT, GET": "{}, {}".format(*s.per_head()),
                }
            )
    return out


def _print(title: str, table_rows: list[dict[str, object]]) -> None:
    table = Table(title=title)
    for name in table_rows[0]:
        table.add_column(name)
    for row in table_rows:
        table.add_row(*map(str, row.values()))
    Console(width=200).print(table)


@ends(60)
def main() -> None:
    if "--json" in sys.argv:
        print(json.dumps({"objects": rows(), "sharing": sharing_rows()}, indent=2))
        return
    _print("Objects and copies of one rank", rows())
    _print("Requests per chunk between tensor-parallel sizes, 8 KV heads", sharing_rows())


if __name__ == "__main__":
    main()
