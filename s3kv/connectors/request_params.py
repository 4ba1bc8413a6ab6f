"""Parameters of one request, from its `kv_transfer_params`.

    {"s3kv": {"save": false, "load": false, "max_save_tokens": 1024}}

and vLLM's own `max_offload_tokens` and `max_load_tokens` beside it. Keys of other connectors are
ignored, except `do_remote_prefill`. vLLM lets no connector refuse a request. So a request whose
parameters cannot be read is served, but nothing of it is saved, in case its parameters forbid that.
"""

from __future__ import annotations

import logging
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from s3kv.planning.requests import NO_LIMITS, RequestLimits
from s3kv.types import Tally, once_a_minute

logger = logging.getLogger("s3kv")

_REASON_LENGTH = 200
_UNREADABLE = "s3kv saves nothing of request %s, because its kv_transfer_params cannot be read: %s"
_may_log = once_a_minute(time.monotonic)

Tokens = Annotated[int, Meta(ge=0)]


class _OwnParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    save: bool = True
    load: bool = True
    max_save_tokens: Tokens | None = None


class _Params(msgspec.Struct, frozen=True):
    s3kv: _OwnParams = _OwnParams()
    max_offload_tokens: Tokens | None = None
    max_load_tokens: Tokens | None = None


def read_limits(params: Any, request_id: str = "", counters: Tally | None = None) -> RequestLimits:
    """The limits in a request's `kv_transfer_params`. counters: count the request if these cannot
    be read. Clients could fill the log with such requests, so one a minute is logged."""
    if not params:
        return NO_LIMITS
    try:
        given = msgspec.convert(params, _Params)
    except (msgspec.ValidationError, UnicodeError) as error:
        if counters is not None:
            counters["unreadable_params"] += 1
            if _may_log("unreadable"):
                # Both may be the client's text.
                said = (ascii(text)[1:-1][:_REASON_LENGTH] for text in (request_id, str(error)))
                logger.warning(_UNREADABLE, *said)
        return RequestLimits(save_tokens=0)
    own = given.s3kv
    save_tokens = _least(own.max_save_tokens, given.max_offload_tokens, None if own.save else 0)
    load_tokens = _least(given.max_load_tokens, None if own.load else 0)
    return RequestLimits(save_tokens, load_tokens)


def params_of(request: Any) -> Any:
    """The `kv_transfer_params`; for a session, its current turn's: vLLM keeps the first turn's."""
    if getattr(request, "resumable", False) and request.sampling_params is not None:
        return (request.sampling_params.extra_args or {}).get("kv_transfer_params")
    return request.kv_transfer_params


def reads(request: Any) -> bool:
    """Whether the bucket may serve the request. It may not while another engine will send the
    prompt: a `MultiConnector` waits for all of its connectors, and loads from the first, such as
    NIXL. NIXL removes the mark when its transfer begins."""
    params = request.kv_transfer_params
    is_sent = isinstance(params, dict) and params.get("do_remote_prefill")
    return not (request.skip_reading_prefix_cache or is_sent)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
