"""A fleet: replicas behind a round-robin proxy, one of which is killed and replaced.

Everything runs in the caller's thread, which polls: an engine may not be used from two, and Ctrl-C
reaches all that has been started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from demo.conversations import Conversation
from demo.figures import Figures, Served, figures_of, total
from demo.reader import Reader
from lab.engine import Answer, Ask, Engine, EngineFailed, Pending

AT_ONCE = 2
"""Requests under way: one for each core of a small machine."""
KILL_AT, HOLD_AT = 2 / 5, 3 / 5
"""Shares of the requests: after the first a replica is killed, after the second the replacement is
waited for, however long it takes to start."""
_WARM_UP = list(range(2, 102))
"""The first request of an engine pays for lazy set-up. This one is shorter than a chunk."""
_TICK_S = 0.02


class Replica:
    """An engine that starts, serves, and may be killed. state: starting, serving, killed."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.state = "starting"
        self.engine = engine
        self._served: list[Served] = []
        self._metrics: dict[str, float] = {}
        self._asked: Pending | None = None
        self._steps = self._start()
        self._step: Pending | None = next(self._steps)

    def _start(self) -> Iterator[Pending]:
        yield self.engine.launch()
        yield self.engine.begin_generate([_WARM_UP])

    def poll(self) -> None:
        """Go on with the start, or with what is known of the metrics. Raises `EngineFailed`."""
        if self.state == "starting":
            while self._step is not None and self._step.done():
                self._step.result()
                self._step = next(self._steps, None)
            if self._step is None:
                self.state = "serving"
        elif self.state == "serving" and self._asked is not None and self._asked.done():
            self._metrics = dict(self._asked.result())
            self._asked = None

    def served(self, one: Served) -> None:
        """Count an answer."""
        self._served.append(one)
        if self._asked is None:
            self._asked = self.engine.begin_metrics()

    def settle(self) -> None:
        """Learn what has been counted so far. Connectors report in the step after."""
        if self._asked is not None:
            self._asked.result()
            self._asked = None
        self.engine.generate([_WARM_UP], max_tokens=2)
        self._metrics = self.engine.metrics()

    def kill(self) -> None:
        """End all its processes as the end of a machine would. It is noticed later."""
        self.state = "killed"
        for process in self.engine.processes():
            process.kill()

    def figures(self) -> Figures:
        return figures_of(self._served, self._metrics)


@dataclass(slots=True)
class _Flight:
    """A request on its way. sent_s: for the first time; passed_s: to this replica."""

    conversation: Conversation
    sent_s: float
    passed_s: float
    replica: Replica
    pending: Pending


@dataclass(slots=True)
class Fleet:
    """Two replicas behind a proxy that passes requests to each in turn.

    engine: makes the engine of the replica of this name. tell: takes what happens, as a sentence.
    tick: is called many times a second.
    """

    engine: Callable[[str], Engine]
    reader: Reader
    answer_tokens: int
    tell: Callable[[str], None]
    tick: Callable[[Fleet], None]
    replicas: list[Replica] = field(default_factory=list)
    sent: int = 0
    repeated: int = 0
    _next: int = 0
    _flights: list[_Flight] = field(default_factory=list)

    def run(self, requests: Sequence[Conversation]) -> None:
        """Serve the requests in order, with a kill and a replacement on the way."""
        self.tell("replicas A and B start")
        first, second = self._launch("A"), self._launch("B")
        self._wait(lambda: first.state == second.state == "serving")
        self.tell(f"{len(requests)} requests begin, {AT_ONCE} at a time, to A and B in turn")
        kill_at, hold_at = (int(len(requests) * share) for share in (KILL_AT, HOLD_AT))
        self._serve(requests[:kill_at])
        self._kill(second, requests[kill_at])
        third = self._launch("C")
        self._serve(requests[kill_at + 1 : hold_at])
        self._wait(lambda: third.state == "serving")
        self.tell("C serves, with empty caches of its own")
        self._serve(requests[hold_at:])
        self._wait(lambda: not self._flights)
        for replica in self._serving():
            replica.settle()
        self.tell("all requests are answered")
        self.tick(self)

    def figures(self) -> Figures:
        return total(replica.figures() for replica in self.replicas)

    def end(self) -> None:
        """Kill what runs. Idempotent."""
        for replica in self.replicas:
            replica.engine.kill()

    def _serve(self, requests: Sequence[Conversation]) -> None:
        """Send the requests, each as soon as it may be sent."""
        for conversation in requests:
            self._wait(partial(self._may_send, conversation))
            self._send(conversation)

    def _launch(self, name: str) -> Replica:
        replica = Replica(name, self.engine(name))
        self.replicas.append(replica)
        return replica

    def _kill(self, victim: Replica, conversation: Conversation) -> None:
        """Kill a replica that has one request, this one."""
        self._wait(
            lambda: (
                self._may_send(conversation)
                and all(flight.replica is not victim for flight in self._flights)
            )
        )
        victim.settle()
        self._send(conversation, to=victim)
        victim.kill()
        self.tell(f"{victim.name} is killed (SIGKILL) with a request under way; C starts")

    def _serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state == "serving"]

    def _may_send(self, conversation: Conversation) -> bool:
        """Whether the turn before is answered, and there is room for another request."""
        under_way = [flight.conversation for flight in self._flights]
        return len(under_way) < AT_ONCE and conversation not in under_way

    def _send(
        self, conversation: Conversation, *, to: Replica | None = None, sent_s: float | None = None
    ) -> None:
        """Pass a request to `to`, or to the next in turn. sent_s: it was sent before."""
        if to is None:
            serving = self._serving()
            to = serving[self._next % len(serving)]
        self._next += 1
        self.sent += sent_s is None
        now_s = time.monotonic()
        ask = Ask(conversation.prompt, self.answer_tokens, stop=list(self.reader.stop))
        pending = to.engine.begin_generate([ask])
        flight = _Flight(conversation, now_s if sent_s is None else sent_s, now_s, to, pending)
        self._flights.append(flight)

    def _wait(self, condition: Callable[[], bool]) -> None:
        while True:
            self._poll()
            if condition():
                return
            self.tick(self)
            time.sleep(_TICK_S)

    def _poll(self) -> None:
        for replica in self.replicas:
            replica.poll()
        for flight in [one for one in self._flights if one.pending.done()]:
            self._flights.remove(flight)
            try:
                (answer,) = (Answer(**one) for one in flight.pending.result())
            except EngineFailed:
                if flight.replica.state != "killed":
                    raise
                self.repeated += 1
                self._send(flight.conversation, sent_s=flight.sent_s)
            else:
                self._answered(flight, answer)

    def _answered(self, flight: _Flight, answer: Answer) -> None:
        lost_s = flight.passed_s - flight.sent_s
        prompt_tokens = len(flight.conversation.prompt)
        ttft_s = lost_s + (answer.ttft_s or answer.seconds)
        flight.replica.served(Served(prompt_tokens, answer.cached_tokens or 0, ttft_s))
        if flight.replica in self.replicas[2:] and flight.replica.figures().requests == 1:
            said = self.reader.text(answer.tokens)
            self.tell(f'{flight.replica.name} is asked "{flight.conversation.question}": {said}')
        flight.conversation.answered(answer.tokens)
