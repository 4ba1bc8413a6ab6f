"""vLLM's HTTP server beside others on its host: a port in use, and a second server."""

from __future__ import annotations

import socket

import pytest

from tests.system.e2e.conftest import START_AND_STOP_S, Rig
from tests.system.e2e.test_serve import HIT_TOKENS, PROMPTS, start, vllm_serve
from tests.waiting import wait_until

CHUNKS = HIT_TOKENS // 128


def test_a_server_whose_port_is_in_use_ends_with_that(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start(
            rig.tiny, rig.patient, rig.s3.env, rig.tmp_path / "server.log", "--port", port
        )
        try:
            printed = server.refusal(START_AND_STOP_S)
        finally:
            server.kill()
    assert [line for line in printed if line.strip()][-1].endswith("Address already in use")


@pytest.mark.nightly
@pytest.mark.timeout(4 * START_AND_STOP_S)
def test_a_second_server_is_served_by_the_first_and_survives_its_kill(rig: Rig) -> None:
    """Two on one host, each with a port, host memory and an I/O process of its own. `kill -9` of
    one, whatever vLLM leaves of it, does the other no harm."""
    expected = rig.truth(PROMPTS)
    with vllm_serve(rig.tiny, rig.patient, rig.s3.env, rig.tmp_path / "first.log") as first:
        assert first.complete(PROMPTS[0]) == expected[0]
        wait_until("the prompt is in the bucket", lambda: len(rig.objects()) == CHUNKS)
        with vllm_serve(rig.tiny, rig.patient, rig.s3.env, rig.tmp_path / "second.log") as second:
            assert second.complete(PROMPTS[0]) == expected[0]
            assert second.metric("vllm:s3kv_hit_tokens_bucket_total") == HIT_TOKENS
            first.kill_first()
            assert second.complete(PROMPTS[1]) == expected[1]
            wait_until("the other is there, too", lambda: len(rig.objects()) == 2 * CHUNKS)
            assert second.metric("vllm:s3kv_internal_errors_total") == 0
            second.interrupt()
            second.wait_until_gone(200.0)
