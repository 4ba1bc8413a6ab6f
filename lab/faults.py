"""What can go wrong between s3kv and its store, as data that `lab.proxy` acts upon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "refuse",
    "certificate",
    "black_hole",
    "reset_before_head",
    "reset_inside_head",
    "reset_after_head",
    "reset_mid_body",
    "lose_answer",
    "truncate",
    "shorten",
    "flip_head",
    "flip_body",
    "delay",
    "trickle",
    "answer",
]
"""What happens to a request that the fault is for.

refuse: nobody listens; open connections are reset. All requests.
certificate: TLS with the proxy's other certificate; open connections are reset. All requests.
black_hole: the request is swallowed and never answered.
reset_before_head, reset_inside_head, reset_after_head: TCP reset in place of (the rest of) the
    answer. The first does not let the request through to the server.
reset_mid_body, truncate: reset, or an orderly end, after `at` bytes of the body.
lose_answer: the server does what it is asked, and the connection is reset instead of its answer.
shorten: the body is `at` bytes long, and Content-Length says so.
flip_head: a bit of the answer's status line. flip_body: a bit of the body's byte number `at`.
delay: the answer comes `seconds` later.
trickle: the body comes in pieces of `nbytes` every `seconds`.
answer: `status`, `headers` and `body` in place of the server, which is not asked.

The body is the request's when it has one (an upload), else the answer's. `at` below 0 counts
from the end of the body, and None is its middle.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """verbs: for which requests, of GET, PUT, HEAD, DELETE and LIST; none: for all.
    times: for how many of them; None: until the fault is lifted."""

    kind: Kind
    verbs: tuple[str, ...] = ()
    lacks: str = ""
    """Only requests without this header, "name: value" with the name in lower case."""
    times: int | None = None
    at: int | None = None
    seconds: float = 0.0
    nbytes: int = 1
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    """Latin-1, so that it can be any bytes."""

    @property
    def needs_new_connections(self) -> bool:
        return self.kind in ("refuse", "certificate")


def s3_error(status: int, code: str, **options: object) -> Fault:
    """The store answers with this error. options: `verbs`, `times` and `headers` of the fault."""
    said = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>on command</Message></Error>'
    headers = {"Content-Type": "application/xml", **options.pop("headers", {})}  # type: ignore[dict-item]
    return Fault(kind="answer", status=status, headers=headers, body=said, **options)  # type: ignore[arg-type]
