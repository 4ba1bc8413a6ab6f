"""One fault of each kind between a serving engine and its store, one after the other.

`tests/system/faults` has all of them, at every moment; here the tokens are the model's own, in
float32, where they do not depend on how long the hit was.
"""

from __future__ import annotations

import dataclasses

from lab.proxy import proxy
from lab.s3 import S3Server
from tests.system.e2e.conftest import Rig, changed, patient_for
from tests.system.e2e.test_failures import CHUNKS, FEW_SLOTS, PROMPTS, Asker
from tests.system.faults.cases import CASES

# With half a megabyte an object, giving up after 0.5 s of silence is a second in all, not a minute.
SOON = {
    "request_timeout_ms": 1_000,
    "min_bytes_per_s": 2**18,
    "max_attempts": 2,
    "max_wait_ms": 2_000,
    "miss_ttl_s": 0.1,
}
# What damages an object makes this engine leave it alone for good, so that it strikes once.
STRUCK = {
    "refuse": None,
    "reset-mid-body": None,
    "trickle": None,
    "black-hole": None,
    "slow-down": None,
    "access-denied": None,
    "flipped-payload": 1,
}


def test_one_of_each_kind(rig: Rig) -> None:
    expected = rig.reference(rig.tiny, PROMPTS, dtype="float32")
    with proxy(str(rig.s3.url)) as store:
        connector = patient_for(S3Server(store.url, rig.s3.env), rig.bucket, fails=True)
        connector = changed(connector, **FEW_SLOTS, **SOON)
        with rig.serve(rig.tiny, connector, dtype="float32") as engine:
            asker = Asker(engine, expected)
            asker.ask_until(
                "everything is in the bucket", lambda: len(rig.objects()) >= CHUNKS * len(PROMPTS)
            )
            asker.ask_until("the bucket is used", lambda: asker.bucket_hits() > 0)
            for name, times in STRUCK.items():
                case = CASES[name]
                counter = f"vllm:s3kv_{case.fetch}_total"
                before = engine.metrics().get(counter, 0)
                store.fault(dataclasses.replace(case.fault, times=times))
                asker.ask_until(
                    f"{name} is counted",
                    lambda: engine.metrics()[counter] > before,  # noqa: B023
                )
                asker.ask(*range(len(PROMPTS)))
                store.lift()
                hits = asker.bucket_hits()
                asker.ask_until(
                    f"the bucket is used after {name}",
                    lambda: asker.bucket_hits() > hits,  # noqa: B023
                )
            metrics = engine.metrics()
            for counter in ("io_retries", "io_throttled", "io_window_cuts"):
                assert metrics[f"vllm:s3kv_{counter}_total"] > 0, counter
