"""`s3kv warm` on vLLM's own server: what it sends is in the bucket afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.s3 import S3Server
from s3kv.cli.app import cli
from tests.e2e.conftest import START_AND_STOP_S, changed
from tests.e2e.test_failures import SAVED_AT_ONCE, wait_until
from tests.e2e.test_serve import HIT_TOKENS, PROMPTS, vllm_serve


@pytest.mark.timeout(2 * START_AND_STOP_S)
def test_the_bucket_holds_what_was_sent(
    tiny: Path, s3: S3Server, bucket: str, patient: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    # The server has no tokenizer: it takes token ids and is not to make text of its answer.
    bodies = [{"prompt": prompt, "detokenize": False} for prompt in PROMPTS]
    file.write_text("\n".join(map(json.dumps, bodies)))
    connector = changed(patient, **SAVED_AT_ONCE)
    details = "--enable-prompt-tokens-details"
    with vllm_serve(tiny, connector, s3.env, tmp_path / "server.log", details) as server:
        command = ["warm", str(file), "--url", server.url, "--json"]
        cached = []
        for _ in range(2):
            result = CliRunner().invoke(cli, command, catch_exceptions=False)
            assert result.exit_code == 0, result.output
            found = json.loads(result.stdout)
            assert found["prompt_tokens"] == sum(map(len, PROMPTS))
            cached.append(found["cached_tokens"])
        wait_until("uploads are done", lambda: len(s3.objects(bucket)) == 12)
    assert cached[0] == 0
    assert cached[1] >= 2 * HIT_TOKENS
