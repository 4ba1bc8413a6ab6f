"""Conversations of agents that share a system prompt: the traffic of `make demo-chat`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lab import models


@dataclass(frozen=True, slots=True)
class Traffic:
    """Amount of traffic. A first prompt is the system prompt and a task; every later one has the
    answer to the one before, and another message, at its end.
    """

    conversations: int = 12
    turns: int = 4
    system_tokens: int = 1_024
    task_tokens: int = 1_536
    message_tokens: int = 240
    answer_tokens: int = 16

    @property
    def requests(self) -> int:
        return self.conversations * self.turns


class Conversation:
    """A conversation. `prompt` is what is to be asked next."""

    def __init__(self, prompt: list[int], messages: Sequence[list[int]]) -> None:
        self.prompt = prompt
        self._messages = list(messages)

    def answered(self, tokens: Sequence[int]) -> None:
        """Go on to the next turn."""
        message = self._messages.pop(0) if self._messages else []
        self.prompt = [*self.prompt, *tokens, *message]


def begin(traffic: Traffic, *, seed: int = 0) -> list[Conversation]:
    """The conversations, in the order of the requests: one after another takes its turn, in another
    order in every round. What does not depend on the answers is the same for the same seed."""
    (system,) = models.prompts(1, traffic.system_tokens, seed=seed)
    tasks = models.prompts(traffic.conversations, traffic.task_tokens, seed=seed + 1)
    later = traffic.turns - 1
    messages = models.prompts(traffic.conversations * later, traffic.message_tokens, seed=seed + 2)
    conversations = [
        Conversation([*system, *task], messages[number * later :][:later])
        for number, task in enumerate(tasks)
    ]
    draw = random.Random(seed)
    rounds = (draw.sample(conversations, traffic.conversations) for _ in range(traffic.turns))
    return [conversation for one in rounds for conversation in one]
