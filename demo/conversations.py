"""Conversations on pages of this project that share a system prompt: those of `make demo-chat`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from demo.reader import PAGES, QUESTIONS, Reader, pages_as_text, plain
from lab.engine import ROOT


@dataclass(frozen=True, slots=True)
class Traffic:
    """Amount of traffic. A first prompt is the system prompt, which is this project's glossary and
    questions, another page, and a question; every later one has the answer to the one before, and
    another question, at its end. The system prompt has answers."""

    conversations: int = 12
    turns: int = len(QUESTIONS)
    system_tokens: int = 2_560
    page_tokens: int = 1_024
    """The most of them: some pages have a little less."""
    answer_tokens: int = 24

    @property
    def requests(self) -> int:
        return self.conversations * self.turns


class Conversation:
    """A conversation. `prompt` is what is to be asked next; it ends with `question`."""

    def __init__(self, reader: Reader, beginning: list[int], questions: Sequence[str]) -> None:
        self._reader = reader
        self._questions = list(questions)
        self.prompt = beginning
        self._ask()

    def answered(self, tokens: Sequence[int]) -> None:
        """Go on to the next turn."""
        self.prompt = [*self.prompt, *(one for one in tokens if one not in self._reader.stop)]
        if self._questions:
            self._ask()

    def _ask(self) -> None:
        self.question = self._questions.pop(0)
        message = self._reader.tokens(f"\n\nQuestion: {self.question}\nAnswer:")
        self.prompt = [*self.prompt, *message]


def begin(traffic: Traffic, reader: Reader, *, seed: int = 0) -> list[Conversation]:
    """The conversations, in the order of the requests: one after another takes its turn, in another
    order in every round. What does not depend on the answers is the same for the same seed."""
    system = reader.tokens(pages_as_text(PAGES[1:]))[: traffic.system_tokens]
    texts = [plain(path.read_text()) for path in (ROOT / "docs" / "decisions").glob("0*.md")]
    longest = sorted(texts, key=lambda text: (-len(text), text))[: traffic.conversations]
    conversations = []
    for number, text in enumerate(longest):
        page = reader.tokens("\n" + text)[: traffic.page_tokens]
        questions = [QUESTIONS[(number + turn) % len(QUESTIONS)] for turn in range(traffic.turns)]
        conversations.append(Conversation(reader, [*system, *page], questions))
    draw = random.Random(seed)
    rounds = (draw.sample(conversations, traffic.conversations) for _ in range(traffic.turns))
    return [conversation for one in rounds for conversation in one]
