"""Every fault at every moment of a worker's life, with a real I/O process and a real server.

In each cell: a request is answered, with right bytes or none; what is under way ends; the planner's
books balance at every step (`Life.step`); the counter that tells of the fault moves; and when the
fault is over the cache is of use again, by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.constants import changed
from lab.proxy import Proxy, plain_and_tls
from lab.s3 import S3Server, moto_process
from s3kv.config import KEYS_VARIABLE, Config
from s3kv.metrics import KV_METRICS
from tests.project import ROOT
from tests.servers import REAL_SERVERS, set_credentials
from tests.system.encrypted_form import decrypted, encrypted, encrypted_key
from tests.system.faults.cases import CASES, Case
from tests.system.faults.life import CONSTANTS, Life
from tests.system.faults.nameless import NAME, VARIABLE
from tests.system.forms import compressed, opened
from tests.unit.io import rig

BUCKET = "faults"
RECOVERIES = 20
PATIENT: dict[str, Any] = {"request_timeout_ms": 60_000, "max_wait_ms": 60_000}
"""Of lives in which every fault is seen at once: what is slow then is the machine."""
_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=["moto", REAL_SERVERS[-1]])
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    if request.param != "moto":
        gateway = request.getfixturevalue(request.param)
        found = S3Server(gateway.url, gateway.keys | {"AWS_DEFAULT_REGION": "us-east-1"})
        found.client().create_bucket(Bucket=BUCKET)
        yield found
        return
    with moto_process() as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found


@pytest.fixture(scope="module")
def proxies(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with plain_and_tls(str(server.url), tmp_path_factory.mktemp("tls")) as found:
        yield found


class Scene:
    """One fault, what stands in its way, and the life it strikes."""

    def __init__(
        self, case: Case, kind: str, server: S3Server, proxies: dict[str, Any], names: Path
    ) -> None:
        self.case = case
        self._compresses, self._encrypts = kind == "compressed", kind == "encrypted"
        self._client = kind if kind == "aiobotocore" else "fast"
        self.proxy: Proxy = proxies[case.scheme]
        self._s3 = server.client()
        self._names = names
        self._ca_bundle = proxies["ca_bundle"] if case.scheme == "https" else None
        self._life: Life | None = None
        self._before: Counter[str] = Counter()

    @property
    def life(self) -> Life:
        if self._life is None:
            # Where timeouts are short, a machine that stands still for a moment is trouble, too.
            assert self.new_life().start() is None or self.case.in_time
        return self._life

    def new_life(self) -> Life:
        self.end()
        module = "tests.system.faults.nameless" if self.case.nameless else "s3kv.io"
        url = self.proxy.url
        if self.case.nameless:
            url = url.replace("127.0.0.1", NAME)
        compress = "on" if self._compresses else "off"
        encryption = "aes-gcm" if self._encrypts else "off"
        settings = {"client": self._client, "ca_bundle": self._ca_bundle, "drain_timeout_s": 0.5}
        settings |= {} if self.case.in_time else PATIENT
        self._life = Life(url, BUCKET, module, compress=compress, encryption=encryption, **settings)
        return self._life

    def end(self) -> None:
        life, self._life = self._life, None
        if life is not None and life.is_started and not life.is_over:
            life.stop()

    def strike(self, *verbs: str) -> None:
        started = self._life is not None and self._life.is_started
        self._before = self.life.counters() if started else Counter()
        self._struck = sum(self.proxy.statistics().faults.values())
        if self.case.nameless:
            self._names.touch()
            self.proxy.cut()
        if self.case.fault is not None:
            self.proxy.fault(dataclasses.replace(self.case.fault, verbs=verbs))

    def lift(self) -> None:
        self._names.unlink(missing_ok=True)
        self.proxy.lift()

    def settle(self) -> None:
        """The fault is over, and what it has left under way ends."""
        self.lift()
        self.life.settle()

    def moved(self) -> Counter[str]:
        """What has been counted since the fault struck."""
        if self.case.fault is not None:
            assert sum(self.proxy.statistics().faults.values()) > self._struck, "it never struck"
        return self.life.counters() - self._before

    def chunks(self, count: int, *, kept: bool = False) -> list[int]:
        """Chunks nobody has asked for yet; `kept`: which the bucket has."""
        numbers = list(itertools.islice(_numbers, count))
        for number in numbers:
            if kept or self.case.planted:
                self._store(number, number + 1 if self.case.planted else number)
        return numbers

    def _store(self, number: int, content: int) -> None:
        """Put an object into the bucket, without the proxy. content: the chunk that it is of."""
        body = rig.sealed(content)
        if self._compresses:
            body = compressed(rig.FORMAT, body, rig.chunk(content).block_hash)
        if self._encrypts:
            body = encrypted(rig.object_key(content), MASTER, body, ENCRYPTED_SEGMENT_BYTES)
        self._s3.put_object(Bucket=BUCKET, Key=self._key(number), Body=body)

    def _listed(self, *keys: str) -> list[dict[str, Any]]:
        pages = [self._s3.list_objects_v2(Bucket=BUCKET, Prefix=key) for key in keys]
        return [entry for page in pages for entry in page.get("Contents", ())]

    def _key(self, number: int) -> str:
        key = rig.object_key(number)
        return encrypted_key(key, MASTER) if self._encrypts else key

    def recovered(self) -> None:
        """The fault is over: the bucket is of use again."""
        for _ in range(RECOVERIES):
            self.life.later()
            (number,) = itertools.islice(_numbers, 1)
            self._store(number, number)
            if self.life.serve(number) == 1:
                self.life.settle()
                return
        pytest.fail(f"no hit in {RECOVERIES} tries: {self.life.counters()}")

    def objects_are_whole(self, numbers: list[int]) -> None:
        """What is in the bucket is what was sent, or is refused by whoever reads it."""
        for number in numbers:
            for entry in self._listed(self._key(number)):
                body = self._s3.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
                if self._encrypts:
                    plain = decrypted(rig.object_key(number), MASTER, body, ENCRYPTED_SEGMENT_BYTES)
                    body = plain or b""
                refused, place = opened(rig.FORMAT, body, rig.chunk(number).block_hash)
                assert refused or place.payload == rig.payload(number)
                assert refused is None or body != rig.sealed(number)

    def are_encrypted(self, numbers: list[int]) -> bool:
        """Whether some of the chunks in the bucket are, and all have to be; or none has to be."""
        if not self._encrypts:
            return True
        plain = [rig.object_key(number) for number in numbers]
        others = [encrypted_key(key, MASTER) for key in plain]
        held = {entry["Key"] for entry in self._listed(*plain, *others)}
        return bool(held) and held <= {*others}

    def are_compressed(self, numbers: list[int]) -> bool:
        """Whether some of the chunks in the bucket are, or none has to be."""
        lengths = [entry["Size"] for entry in self._listed(*map(rig.object_key, numbers))]
        return not self._compresses or min(lengths) < rig.FORMAT.object_bytes


BY_SDK = ("reset-mid-body", "truncated", "flipped-payload", "slow-down", "black-hole", "trickle")
"""Cases that strike AWS's SDK, too: one of each kind."""
MASTER = bytes(range(32))
ENCRYPTED_SEGMENT_BYTES = 4096
IN_FLIGHT = (
    "reset-mid-body",
    "truncated",
    "truncated-and-relabelled",
    "flipped-object-header",
    "flipped-payload",
    "wrong-object",
    "trickle",
)
"""Cases that strike compressed objects, too: those on a body. All but the slow: encrypted ones."""
MORE: dict[str, dict[str, Any]] = {
    "compressed": {"compressed_segment_bytes": 4096, "least_compressed_bytes": 1},
    "encrypted": {"encrypted_segment_bytes": ENCRYPTED_SEGMENT_BYTES},
}


def compressible(number: int) -> bytes:
    """The payload of a chunk, of bytes of eight kinds."""
    kinds = bytes(kind % 8 for kind in range(256))
    return random.Random(number).randbytes(rig.FORMAT.payload_bytes).translate(kinds)


@pytest.fixture(
    scope="module",
    params=[(case, "fast") for case in CASES]
    + [(case, "aiobotocore") for case in BY_SDK]
    + [(case, "compressed") for case in IN_FLIGHT]
    + [(case, "encrypted") for case in IN_FLIGHT if case != "trickle"],
    ids=lambda case: "-".join(case),
)
def scene(
    request: pytest.FixtureRequest,
    server: S3Server,
    proxies: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    names = tmp_path_factory.mktemp("names") / "cannot-be-resolved"
    case, kind = request.param
    with pytest.MonkeyPatch.context() as patch, changed(**CONSTANTS, **MORE.get(kind, {})):
        set_credentials(patch, {k: v for k, v in server.env.items() if "KEY" in k})
        patch.setenv(VARIABLE, str(names))
        patch.setenv(KEYS_VARIABLE, MASTER.hex())
        if kind == "compressed":
            patch.setattr(rig, "payload", compressible)
        it = Scene(CASES[case], kind, server, proxies, names)
        yield it
        it.lift()
        it.end()


def test_at_start(scene: Scene) -> None:
    life = scene.new_life()
    scene.strike()
    trouble = life.start()
    assert scene.case.start in ("", trouble)
    assert life.serve(*scene.chunks(2)) == 0
    scene.settle()
    scene.recovered()


def test_at_lookup(scene: Scene) -> None:
    chunks, life = scene.chunks(2), scene.life
    scene.strike("GET")
    assert life.serve(*chunks) == 0
    life.settle_jobs()
    assert scene.moved()[scene.case.lookup] >= 1, scene.moved()
    scene.settle()
    scene.objects_are_whole(chunks)
    scene.recovered()


def test_at_fetch(scene: Scene) -> None:
    chunks, life = scene.chunks(2, kept=True), scene.life
    scene.strike("GET")
    hits = life.serve(*chunks)
    life.settle_jobs()
    assert scene.moved()[scene.case.fetch] >= 1, scene.moved()
    assert hits == (len(chunks) if scene.case.fetch == "fetch_ok" else 0)
    scene.settle()
    scene.recovered()


def test_at_upload(scene: Scene) -> None:
    chunks, life = scene.chunks(2), scene.life
    scene.strike("PUT")
    life.compute(*chunks)
    life.settle_jobs()
    assert not scene.case.upload or scene.moved()[scene.case.upload] >= 1, scene.moved()
    scene.settle()
    if scene.case.retried is not None:
        assert scene.moved()[scene.case.retried] >= 1, scene.moved()
    scene.objects_are_whole(chunks)
    assert scene.are_compressed(chunks)
    assert scene.are_encrypted(chunks)
    assert life.serve(*chunks) == len(chunks), "they are in host memory all the same"
    scene.recovered()


def test_at_shutdown(scene: Scene) -> None:
    chunks, life = scene.chunks(4), scene.life
    pid = life.client.pid
    scene.strike("PUT")
    life.compute(*chunks)
    assert 0 <= life.stop() <= len(chunks)
    assert life.is_over
    assert not Path(f"/proc/{pid}").exists()
    scene.lift()
    scene.objects_are_whole(chunks)


PAGE = (ROOT / "docs/operating.md").read_text()


def rows() -> list[list[str]]:
    section = PAGE.split("\n## ")[1]
    assert section.startswith("Faults and their cost")
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return [row for row in cells if row[-1]]


def test_every_fault_has_a_row_and_every_row_a_fault() -> None:
    assert [row[-1].strip("`") for row in rows()] == list(CASES)


def test_rows_name_metrics_and_settings_there_are() -> None:
    settings = {field.name for field in dataclasses.fields(Config)}
    for row in rows():
        assert row[2], f"{row[0]}: nothing tells of it"
        for name in re.findall(r"`(\w+)`", row[2]):
            assert name in KV_METRICS, name
        assert set(re.findall(r"`(\w+)`", row[3])) <= settings, row


def test_rows_name_what_the_matrix_sees_move() -> None:
    harmless = {"fetch_ok", "fetch_missing", "upload_ok"}
    for row, case in zip(rows(), CASES.values(), strict=True):
        seen = {case.lookup, case.fetch, case.upload} - harmless
        assert not seen or seen & set(re.findall(r"`(\w+)`", row[2])), row


def test_rows_on_the_disk_name_tests_settings_and_metrics_there_are() -> None:
    section = PAGE.split("\n## ")[2]
    assert section.startswith("Faults of the disk")
    files = re.findall(r"`(tests/[\w/]+\.py)`", section)
    tests = " ".join((ROOT / path).read_text() for path in files)
    known = {field.name for field in dataclasses.fields(Config)} | KV_METRICS.keys()
    for name in re.findall(r"`(\w+)`", section):
        assert f"def {name}(" in tests if name.startswith("test_") else name in known, name


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"tests/[\w/]+\.py", PAGE)
    assert len(set(named)) >= 6
    for path in named:
        assert (ROOT / path).is_file(), path
