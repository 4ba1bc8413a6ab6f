"""The requests of the comparison: models, prompts, and the cases in which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from benchmarks.origin import ROOT
from benchmarks.rig import SMALL, Size
from lab import smollm
from lab.models import build, prompts

SMOLLM = replace(
    SMALL,
    preset=replace(SMALL.preset, name="smollm", layers=30, kv_heads=3, head_dim=64),
    prompt_tokens=1_088,
)
"""22.5 KiB of KV per token."""
SIZES = {"random": SMALL, "smollm": SMOLLM}
USERS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Case:
    """A way to send prompts.

    users: requests at once, of a warm pass; a cold pass has one. prompts: those of the work.
    """

    name: str
    users: int
    max_tokens: int
    prompts: slice


@dataclass(frozen=True, slots=True)
class Work:
    """A model, its prompts, and the cases of each warm engine. The cases of the first engine divide
    the prompts, so that none is hit twice; they are also the cases of the cold engine."""

    name: str
    size: Size
    model: Path
    prompts: Sequence[Sequence[int]]
    engines: Sequence[Sequence[Case]]

    @property
    def chunks(self) -> int:
        return len(self.prompts) * self.size.chunks_per_prompt

    @property
    def first(self) -> Sequence[Case]:
        return self.engines[0]


def work(name: str, folder: Path, users: Sequence[int], quick: bool) -> Work | str:
    """The work with this model, or why there is none."""
    size = SIZES[name].quick() if quick else SIZES[name]
    if name == "random":
        model: Path | None = build(folder, size.preset)
        texts = prompts(size.prompts, size.prompt_tokens, seed=7)
    else:
        model = smollm.directory()
        texts = _prose(model, size) if model else []
    if model is None:
        return f"{smollm.PACKAGE} or gguf is not installed"
    return Work(name, size, model, texts, cases(users, size.prompts))


def cases(users: Sequence[int], count: int) -> list[list[Case]]:
    """Half of `count` prompts for one user and a quarter for one step; the rest is for as many
    users as it has prompts. More users get all prompts from an engine of their own."""
    shares = {"one user": (1, 8, 2), "one step": (1, 1, 1)} if 1 in users else {}
    few = [number for number in users if 1 < number <= count // 4]
    shares |= {f"{number} users": (number, 8, 1) for number in few}
    ends = list(accumulate(share for *_, share in shares.values()))
    first, start = [], 0
    for (name, (number, max_tokens, _)), end in zip(shares.items(), ends, strict=True):
        stop = count * end // ends[-1]
        first.append(Case(name, number, max_tokens, slice(start, stop)))
        start = stop
    many = [Case(f"{n} users", n, 8, slice(0, count)) for n in users if n > 1 and n not in few]
    if not first:
        return [[case] for case in many]
    return [first, *([case] for case in many)]


def _prose(model: Path, size: Size) -> list[list[int]]:
    """Prompts of the project's documentation, one after another."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    tokens = tokenizer.encode(text).ids
    starts = [number * size.prompt_tokens for number in range(size.prompts)]
    return [tokens[start : start + size.prompt_tokens] for start in starts]
