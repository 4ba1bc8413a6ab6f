"""What breaks around a serving engine may cost a hit, never a token, a request or an engine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab import models
from lab.engine import Answer, Engine, EngineFailed
from lab.faults import s3_error
from lab.proxy import proxy
from lab.s3 import S3Server
from tests.system.e2e.conftest import SECOND, References, Rig, changed, patient_for, tokens
from tests.system.e2e.servers import Store
from tests.waiting import wait_until

CHUNKS = 4
PROMPTS = models.prompts(6, CHUNKS * 128 + 40)
CHUNK_BYTES = 128 * 2 * models.TINY.kv_bytes_per_token
# Ten slots: two prompts fit, so with six in turn every hit comes from the bucket.
FEW_SLOTS = {"host_bytes": 10 * (CHUNK_BYTES + 2 * 4096)}


class Asker:
    """Asks one engine for prompts in turn, and holds every answer against the reference."""

    def __init__(self, engine: Engine, expected: Sequence[Answer]) -> None:
        self._engine = engine
        self._expected = tokens(expected)

    def ask(self, *numbers: int) -> list[Answer]:
        """Serve these prompts, none of them from the engine's own cache."""
        self._engine.reset_prefix_cache()
        answers = self._engine.generate([PROMPTS[n] for n in numbers], concurrency=len(numbers))
        self.check(answers, numbers)
        return answers

    def check(self, answers: Sequence[Answer], numbers: Sequence[int]) -> None:
        assert [a.finish_reason for a in answers] == ["length"] * len(numbers)
        assert tokens(answers) == [self._expected[n] for n in numbers]

    def ask_until(self, what: str, true: Callable[[], bool], timeout_s: float = 250.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"never happened: {what}"
            for number in range(len(PROMPTS)):
                self.ask(number)

    def bucket_hits(self) -> float:
        return self._engine.metrics()["vllm:s3kv_hit_tokens_bucket_total"]


@pytest.fixture
def expected(tiny: Path, reference: References) -> list[Answer]:
    return reference(tiny, PROMPTS, dtype="float32")


def test_wrong_credentials_no_start(tiny: Path, weed: S3Server, tmp_path: Path) -> None:
    weed.client().create_bucket(Bucket="kv-cache")
    wrong = {**weed.env, "AWS_SECRET_ACCESS_KEY": "wrong"}
    connector = patient_for(S3Server(weed.url, wrong), "kv-cache", fails=True)
    engine = Engine(tiny, connector=connector, log_path=tmp_path / "log", env=wrong, **SECOND)
    with pytest.raises(EngineFailed, match="ended"):
        engine.start()
    wait_until("all processes end", lambda: not engine.processes())
    said = next(line for line in engine.log_path.read_text().splitlines() if "s3kv: bucket" in line)
    for word in ("kv-cache", str(weed.url), "403", "AWS_SECRET_ACCESS_KEY"):
        assert word in said


def test_permissions_that_allow_nothing(rig: Rig, expected: list[Answer]) -> None:
    """The log names each permission that is missing, once, however often it is missed."""
    log = rig.tmp_path / "log"
    with proxy(str(rig.s3.url)) as store:
        store.fault(s3_error(403, "AccessDenied"))
        connector = patient_for(S3Server(store.url, rig.s3.env), "kv-cache", fails=True)
        connector = changed(connector, on_unavailable="serve")
        with Engine(
            rig.tiny, connector=connector, log_path=log, env=rig.s3.env, dtype="float32"
        ) as engine:
            asker = Asker(engine, expected)
            asker.ask(0, 1)
            asker.ask(2)
            asker.ask_until(
                "an upload is tried",
                lambda: engine.metrics()["vllm:s3kv_upload_denied_total"] > CHUNKS,
            )
            metrics = engine.metrics()
    assert metrics["vllm:s3kv_fetch_denied_total"] > 1
    assert metrics["vllm:s3kv_internal_errors_total"] == 0
    said = [line for line in log.read_text().splitlines() if "s3kv" in line]
    # What the namespace is called elsewhere is looked for once, at start, and said separately.
    said = [line for line in said if "the namespace's manifest cannot be read" not in line]
    for action in ("s3:ListBucket", "s3:GetObject", "s3:PutObject"):
        (line,) = [line for line in said if f": {action} on arn:aws:s3:::kv-cache" in line]
        assert store.url in line
        assert "403" in line
    assert any("without s3:ListBucket" in line for line in said)


def test_the_io_process_killed_in_the_middle(rig: Rig, expected: list[Answer]) -> None:
    with proxy(str(rig.s3.url)) as slow:
        connector = changed(
            patient_for(S3Server(slow.url, rig.s3.env), rig.bucket, fails=True), **FEW_SLOTS
        )
        with rig.serve(rig.tiny, connector, dtype="float32", **SECOND) as engine:
            asker = Asker(engine, expected)
            slow.shut_after(CHUNK_BYTES * 3 // 2)
            asker.ask(0, 1)
            slow.wait_until_shut(200.0)  # in the middle of an upload
            kill_io(engine)
            slow.open()
            asker.ask_until(
                "the uploads are made up for", lambda: len(rig.objects()) == CHUNKS * len(PROMPTS)
            )

            engine.reset_prefix_cache()
            slow.shut_after(CHUNK_BYTES * 3 // 2)
            pending = engine.begin_generate(PROMPTS, concurrency=3)
            slow.wait_until_shut(200.0)  # in the middle of a fetch
            kill_io(engine)
            slow.open()
            asker.check([Answer(**answer) for answer in pending.result()], range(len(PROMPTS)))
            before = asker.bucket_hits()
            asker.ask_until("the bucket is used again", lambda: asker.bucket_hits() > before)
            assert engine.metrics()["vllm:s3kv_fetch_failed_total"] > 0


def kill_io(engine: Engine) -> None:
    (process,) = engine.io_processes()
    process.kill()


def test_a_store_that_comes_and_goes_and_an_io_process_that_is_stopped(
    rig: Rig, store: Store, expected: list[Answer]
) -> None:
    """The store is not there at the start, then there, killed in the middle of fetches, and there
    again. In the end the engine's own process is killed, with uploads under way."""
    connector = patient_for(S3Server(store.url, rig.s3.env), Store.BUCKET, fails=True)
    connector = changed(connector, on_unavailable="serve", max_wait_ms=1_500, **FEW_SLOTS)
    with rig.serve(rig.tiny, connector, dtype="float32") as engine:
        asker = Asker(engine, expected)
        asker.ask(0, 1)
        asker.ask(*range(len(PROMPTS)))

        store.start()
        everything = CHUNKS * len(PROMPTS)
        asker.ask_until(
            "everything is in the bucket", lambda: len(store.s3.objects(Store.BUCKET)) == everything
        )
        asker.ask_until("the bucket is used", lambda: asker.bucket_hits() > 0)

        store.remember()
        engine.reset_prefix_cache()
        pending = engine.begin_generate(PROMPTS, concurrency=3)
        store.kill()
        asker.check([Answer(**answer) for answer in pending.result()], range(len(PROMPTS)))
        asker.ask(*range(len(PROMPTS)))

        store.start()
        before = asker.bucket_hits()
        asker.ask_until("the bucket is used again", lambda: asker.bucket_hits() > before)

        (process,) = engine.io_processes()
        cuts = engine.metrics()["vllm:s3kv_deadline_cuts_total"]
        process.send_signal(signal.SIGSTOP)
        for number in range(len(PROMPTS)):
            asker.ask(number)
        assert engine.metrics()["vllm:s3kv_deadline_cuts_total"] > cuts

        process.send_signal(signal.SIGCONT)
        hits = asker.bucket_hits()
        asker.ask_until("the bucket is used once more", lambda: asker.bucket_hits() > hits)
        assert engine.io_processes() == [process]

        # Nothing may outlive the engine's own process.
        engine.reset_prefix_cache()
        engine.begin_generate(models.prompts(4, 1_000, seed=7), concurrency=4)
        (main,) = set(engine.processes()) - {process}
        main.kill()
        wait_until("all processes end", lambda: not engine.processes())
    log = engine.log_path.read_text()
    assert "s3kv serves without the bucket" in log
    assert "s3kv: fetch failed" in log
