"""States of a hybrid model in a bucket, under the requests of a trace: which are worth their bytes.
`python -m benchmarks.states --trace PATH [--json FILE]`.

A resume needs the KV of every token before it and one state. The KV of every block is in the bucket
once it was computed; of the states, those that a rule keeps. The rules:

- last: the state after a prompt's last whole block alone, which vLLM keeps by default.
- spaced N: that, and of the ends of steps before it one per N times a state's bytes of KV. s3kv's
  rule has N = 4.
- ends: that, and all ends of steps.
- ended N: if steps ended at every multiple of N tokens as well. vLLM lets no connector ask for it.
- branch: last, and one at the end of the known prefix, if that is longer than the hit. vLLM ends a
  step there if its own cache knows the prefix, and lets no connector ask for it.

The figures of "host" are about host memory in front of the bucket: what is fetched from the bucket
if a resume uses its state after its KV, so that it leaves after it, or before it, or if a state
leaves together with the block that it follows.

What the model leaves out: time. A request has finished when the next one comes, so two prompts at
once never compute the same. A step computes one prompt, and `--decodes` tokens of answers. Blocks
are 512 tokens, as the trace knows no less. Answers are not saved. A bucket with a budget evicts the
least recently used; without one, a day's objects are stored.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.deadline import QUICK_REQUESTS, ends, say
from benchmarks.origin import commit
from benchmarks.simulation.workload import CHUNK_TOKENS, Arrival, command, identity, load
from s3kv import prices
from s3kv.planning.group_kinds import STATE_SPACING

_PRICES = prices.TABLE["us-east-1/standard"]
_MONTH_S = 365 / 12 * 86_400
_DAY_S = 86_400
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model: of one state of all its layers, and of the KV of a token."""

    name: str
    state_bytes: int
    token_bytes: int


MODELS = (
    Model("LFM2 1.2B", 80 << 10, 12 << 10),
    Model("Qwen3-Next 80B-A3B", 74 << 20, 24 << 10),
    Model("Granite 4.0 H Small", 146 << 20, 16 << 10),
)
"""As in docs/decisions/0020-states.md."""
Key = tuple[str, bytes]


class Memory:
    """Entries of several sizes, of which the least recently used leave. capacity: in bytes; None:
    nothing leaves. together: a state leaves with the block that it follows."""

    def __init__(self, capacity: int | None = None, *, together: bool = False) -> None:
        self.nbytes = 0
        self._capacity = capacity
        self._together = together
        self._entries: OrderedDict[Key, int] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def touch(self, key: Key) -> None:
        self._entries.move_to_end(key)

    def put(self, key: Key, nbytes: int) -> bool:
        """Add or touch an entry. Returns whether it is new."""
        is_new = key not in self._entries
        if is_new:
            self.nbytes += nbytes
        self._entries[key] = nbytes
        self._entries.move_to_end(key)
        while self._capacity is not None and self.nbytes > self._capacity:
            (kind, name), size = self._entries.popitem(last=False)
            self.nbytes -= size
            if self._together and kind == "kv":
                self.nbytes -= self._entries.pop(("state", name), 0)
        return is_new


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt at its admission, in blocks. whole: blocks that a resume may have. known: of them,
    those whose KV is stored. hit: those that are resumed after. step: of a step, at most."""

    whole: int
    known: int
    hit: int
    step: int

    def ends(self) -> set[int]:
        """Where steps end, without anybody's help."""
        return {*range(self.hit + self.step, self.whole, self.step), self.whole}


Rule = Callable[[Prompt, Model], set[int]]


def spaced(times: int) -> Rule:
    def kept(prompt: Prompt, model: Model) -> set[int]:
        interval = max(1, times * model.state_bytes // model.token_bytes)
        ends = sorted(prompt.ends())
        steps = zip([prompt.hit, *ends], ends, strict=False)
        crossing = {
            end
            for begin, end in steps
            if end * CHUNK_TOKENS // interval > begin * CHUNK_TOKENS // interval
        }
        return crossing | {prompt.whole}

    return kept


def ended(tokens: int) -> Rule:
    every = tokens // CHUNK_TOKENS

    def kept(prompt: Prompt, model: Model) -> set[int]:
        multiples = range((prompt.hit // every + 1) * every, prompt.whole, every)
        return prompt.ends() | set(multiples)

    return kept


RULES: dict[str, Rule] = {
    "last": lambda prompt, model: {prompt.whole},
    **{f"spaced {times}": spaced(times) for times in (8, STATE_SPACING, 2, 1)},
    "ends": lambda prompt, model: prompt.ends(),
    **{f"ended {tokens}": ended(tokens) for tokens in (4_096, 2_048, 512)},
    "branch": lambda prompt, model: {prompt.whole, prompt.known},
}


def bucket_run(
    arrivals: Sequence[Arrival],
    model: Model,
    name: str,
    bucket_gib: float,
    batch_tokens: int,
    setup: argparse.Namespace,
) -> dict[str, Any]:
    """Figures of one rule."""
    budget = int(bucket_gib * _GIB)
    stored = Memory(budget or None)
    hits = puts = gets = state_puts = 0
    for prompt, arrival in _prompts(arrivals, stored, batch_tokens - setup.decodes):
        hashes = arrival.hashes
        hits += prompt.hit
        gets += prompt.hit + (prompt.hit > 0)
        if prompt.hit:
            stored.touch(("state", hashes[prompt.hit - 1]))
        for end in RULES[name](prompt, model):
            if end > prompt.hit:
                state_puts += stored.put(("state", hashes[end - 1]), model.state_bytes)
        for block in reversed(hashes):
            puts += stored.put(("kv", block), model.token_bytes * CHUNK_TOKENS)
    months = arrivals[-1].time_s / _MONTH_S
    saved = puts * model.token_bytes * CHUNK_TOKENS, state_puts * model.state_bytes
    gib = stored.nbytes / _GIB
    grown = gib if budget else gib * _DAY_S / arrivals[-1].time_s
    tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    spared = hits * CHUNK_TOKENS / setup.prefill_tokens_per_s / 3600 * setup.engine_dollars_per_hour
    cost = (puts + state_puts) * _PRICES.put / 1000 + gets * _PRICES.get / 1000
    month = {
        "requests": round(cost / months),
        "storage": round(grown * _PRICES.storage),
        "spared": round(spared / months),
    }
    return {
        "model": model.name,
        "bucket_gib": bucket_gib,
        "batch_tokens": batch_tokens,
        "rule": name,
        "hit_percent": round(100 * hits * CHUNK_TOKENS / tokens, 2),
        "kv_gib": round(saved[0] / _GIB, 1),
        "states": state_puts,
        "states_of_kv_percent": round(100 * saved[1] / saved[0], 1),
        "usd_per_month": month | {"net": month["spared"] - month["requests"] - month["storage"]},
    }


def _prompts(
    arrivals: Sequence[Arrival], stored: Memory, step_tokens: int
) -> Iterator[tuple[Prompt, Arrival]]:
    """The prompts that have a whole block before their last token."""
    step = max(1, step_tokens // CHUNK_TOKENS)
    for arrival in arrivals:
        whole = min(len(arrival.hashes), (arrival.prompt_tokens - 1) // CHUNK_TOKENS)
        if not whole:
            continue
        hashes = arrival.hashes
        known = next((n for n in range(whole) if ("kv", hashes[n]) not in stored), whole)
        resumable = (n for n in range(known, 0, -1) if ("state", hashes[n - 1]) in stored)
        yield Prompt(whole, known, next(resumable, 0), step), arrival


ORDERS = ("after", "before", "together")


def host_run(
    arrivals: Sequence[Arrival],
    model: Model,
    order: str,
    host_gib: float,
    setup: argparse.Namespace,
) -> dict[str, Any]:
    """Figures of one order, with s3kv's rule and a bucket without a budget."""
    stored = Memory()
    rule = spaced(STATE_SPACING)
    capacity = int(host_gib * _GIB)
    hosts = [Memory(capacity, together=order == "together") for _ in range(setup.engines)]
    block_bytes = model.token_bytes * CHUNK_TOKENS
    fetched = fetched_states = resumed = from_host = 0
    for prompt, arrival in _prompts(arrivals, stored, setup.batch_tokens[0] - setup.decodes):
        host, hashes = hosts[arrival.engine(setup.engines, "session")], arrival.hashes
        kv = [("kv", block) for block in hashes]
        if prompt.hit:
            state = ("state", hashes[prompt.hit - 1])
            missing = sum(key not in host for key in kv[: prompt.hit])
            lacks = state not in host
            resumed += 1
            from_host += not (missing or lacks)
            fetched += missing * block_bytes
            fetched_states += lacks * model.state_bytes
            if order == "before":
                host.put(state, model.state_bytes)
            for key in reversed(kv[: prompt.hit]):
                host.put(key, block_bytes)
            if order != "before":
                host.put(state, model.state_bytes)
        ends = rule(prompt, model)
        for place, key in enumerate(kv[prompt.hit :], prompt.hit + 1):
            stored.put(key, block_bytes)
            host.put(key, block_bytes)
            if place in ends:
                stored.put(("state", key[1]), model.state_bytes)
                host.put(("state", key[1]), model.state_bytes)
    return {
        "model": model.name,
        "host_gib": host_gib,
        "order": order,
        "resumes": resumed,
        "from_host_alone": from_host,
        "fetched_kv_gib": round(fetched / _GIB, 1),
        "fetched_states_gib": round(fetched_states / _GIB, 1),
    }


@ends(7200)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="a file in Mooncake's form")
    parser.add_argument("--limit", type=int, help="only that many requests, from the start")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_REQUESTS} of them")
    for name, values, doc in (
        ("batch-tokens", (8_192, 2_048), "of a step, at most"),
        ("bucket-gib", (0.0, 1_000.0), "budgets of the bucket; 0: none"),
        ("host-gib", (8.0, 32.0), "host memory per engine"),
    ):
        parser.add_argument(f"--{name}", nargs="+", type=type(values[0]), default=values, help=doc)
    parser.add_argument("--decodes", type=int, default=32, help="tokens of answers in a step")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=8_000.0)
    parser.add_argument("--engine-dollars-per-hour", type=float, default=3.0)
    parser.add_argument("--json", type=Path, help="write everything there")
    setup = parser.parse_args(arguments)
    arrivals = load(setup.trace, QUICK_REQUESTS if setup.quick else setup.limit)
    bucket, host = [], []
    for model, gib, tokens in product(MODELS, setup.bucket_gib, setup.batch_tokens):
        print(f"\n{model.name}, bucket of {gib or 'any'} GiB, steps of {tokens} tokens")
        print(f"{'':16}{'hit %':>8}{'states':>9}{'of KV, %':>10}{'net, $/month':>14}")
        for name in RULES:
            say(f"{model.name}, {gib:g} GiB, {tokens} tokens, {name}")
            run = bucket_run(arrivals, model, name, gib, tokens, setup)
            bucket.append(run)
            print(
                f"{name:16}{run['hit_percent']:8}{run['states']:9,}"
                f"{run['states_of_kv_percent']:10}{run['usd_per_month']['net']:14,}",
                flush=True,
            )
    for model, gib, order in product(MODELS, setup.host_gib, ORDERS):
        host.append(host_run(arrivals, model, order, gib, setup))
        print(*(f"{name} {value}" for name, value in host[-1].items()), sep=", ")
    if setup.json:
        names = ("decodes", "engines", "prefill_tokens_per_s", "engine_dollars_per_hour")
        result = {
            "benchmark": "states",
            "command": command("states", arguments, setup.trace),
            "commit": commit(),
            "trace": identity(setup.trace, len(arrivals)),
            "setup": {name: getattr(setup, name) for name in names},
            "bucket": bucket,
            "host": host,
        }
        setup.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
