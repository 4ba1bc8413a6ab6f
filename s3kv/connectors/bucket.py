"""Making sure of the bucket at start, for both connectors."""

from __future__ import annotations

import logging

from s3kv.config import Config
from s3kv.errors import IoProcessError, StoreError
from s3kv.io.client import IoClient

logger = logging.getLogger("s3kv")


def wait_for_bucket(client: IoClient, config: Config) -> None:
    """Wait until the bucket has been tried. Raises a `StoreError` when it cannot be used and
    `on_unavailable` is "fail", and `IoProcessError`; the client is closed then.
    """
    try:
        ready = client.wait_ready(config.start_timeout_ms / 1000)
    except (IoProcessError, StoreError) as error:
        said = f"s3kv: bucket {config.bucket!r} cannot be used: {error}"
        if isinstance(error, StoreError):
            said += (
                ". The engine does not start without it; with on_unavailable 'serve' it would, "
                "and keep trying"
            )
        told = type(error)(said)
        # One line of its own: vLLM repeats the error at the end of several tracebacks.
        logger.error("%s", told)
        raise told from error
    if ready.trouble is not None:
        logger.warning("s3kv serves without the bucket for now: %s", ready.message)
