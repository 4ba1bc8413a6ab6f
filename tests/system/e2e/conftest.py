"""Engines, models and an S3 for the end-to-end tests.

One engine of its own per test where a connector is involved; the references come from engines
without one that are kept for the whole session, one per set of engine arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab import models, vision
from lab.engine import Answer, Ask, Engine
from lab.s3 import S3Server, moto_process
from lab.zygote import Zygotes
from tests.system.e2e.pictures import Pictures
from tests.system.e2e.servers import Store
from tests.system.kills.aftermath import shared_files
from tests.versions import since

HERE = Path(__file__).parent
START_AND_STOP_S = 400
FLOAT32: dict[str, Any] = {"dtype": "float32"}
"""Of an engine in which a token does not depend on how long the hit was."""
SECOND: dict[str, Any] = {"second_runner": True}
"""Of an engine with the runner that is vLLM's default on a GPU. Tests take it unless they take many
steps, or the first runner is their subject."""


needs_short_convolutions = since(0, 32, "CPU kernels for convolutions over three tokens")
"""On a processor with AVX512-BF16 earlier versions do not start with them."""
_NEEDS = {"lfm2": needs_short_convolutions}


def family_params(
    cases: Iterable[Any], *, default: Collection[str] = (), long: Collection[str] = ()
) -> list[Any]:
    """A case for each family of `lab.families`, by its `name`; one that neither `default` nor
    `long` names is tested at night."""
    found = []
    for case in cases:
        marks = [_NEEDS[case.name]] if case.name in _NEEDS else []
        if case.name not in default:
            marks.append(pytest.mark.long if case.name in long else pytest.mark.nightly)
        found.append(pytest.param(case, marks=marks, id=case.name))
    return found


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None and not os.environ.get("CI")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            # Engines and servers that the tests of a file share are started once.
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
            # An engine starts in 8 s alone and in 40 s on a machine that is busy.
            # A marker added here would be nearer than one of the file.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(START_AND_STOP_S))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make venv"))


@pytest.fixture(scope="session", autouse=True)
def zygotes() -> Iterator[None]:
    """The engines of a session are forked from processes that have imported vLLM."""
    Engine.zygotes = Zygotes()
    yield
    Engine.zygotes.close()
    Engine.zygotes = None


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(models_dir: Path) -> Path:
    """A model with 2 KiB of KV per token, for behaviour."""
    return models.build(models_dir, models.TINY)


@pytest.fixture(scope="session")
def fat(models_dir: Path) -> Path:
    """A model with 64 KiB of KV per token, for transfers."""
    return models.build(models_dir, models.FAT)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with moto_process() as server:
        yield server


@contextlib.contextmanager
def new_bucket(s3: S3Server, like: str | None = None) -> Iterator[str]:
    """A bucket with copies of the objects in `like`; it goes with its contents."""
    client = s3.client()
    name = f"e2e-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    for key in s3.everything(like) if like else ():
        client.copy_object(Bucket=name, Key=key, CopySource={"Bucket": like, "Key": key})
    yield name
    s3.empty(name)
    client.delete_bucket(Bucket=name)


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[str]:
    with new_bucket(s3) as name:
        yield name


@pytest.fixture
def store() -> Iterator[Store]:
    """Not started yet."""
    it = Store()
    yield it
    it.kill()


class References:
    """What a warm run must equal, token for token: the same prompts twice in an engine without a
    connector; the answers of the second pass, where the engine's own cache had the prefix.

    A cold run is no reference: a whole prefill has other matrix shapes than the remainder after a
    hit, bf16 rounds differently, and a greedy token may flip. For the same reason the hit has to
    be as long as the one it is compared with: `hit_tokens`.

    Keeps the engines that were asked last, `ENGINES_KEPT` of them: each takes 0.8 GiB.
    """

    ENGINES_KEPT = 2

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines: dict[str, Engine] = {}
        self._started = 0

    def __call__(
        self,
        model: Path,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 8,
        hit_tokens: int | None = None,
        **engine_args: Any,
    ) -> list[Answer]:
        engine = self.engine(model, **engine_args)
        engine.reset_prefix_cache()
        engine.generate(prompts, max_tokens=max_tokens)
        engine.limit_hits(hit_tokens)
        answers = engine.generate(prompts, max_tokens=max_tokens)
        engine.limit_hits(None)
        return answers

    def engine(self, model: Path, **engine_args: Any) -> Engine:
        """The engine without a connector that computes the references for these arguments. Lives
        until engines for `ENGINES_KEPT` other arguments were asked for."""
        name = json.dumps([str(model), engine_args], sort_keys=True)
        engine = self._engines.pop(name, None)
        if engine is None:
            while len(self._engines) >= self.ENGINES_KEPT:
                self._engines.pop(next(iter(self._engines))).kill()
            engine = Engine(
                model, log_path=self._directory / f"reference-{self._started}.log", **engine_args
            )
            self._started += 1
            engine.start()
        self._engines[name] = engine  # last, as the one asked last
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.kill()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    references = References(tmp_path_factory.mktemp("reference"))
    yield references
    references.close()


class Truth:
    """What an engine without a connector answers."""

    def __init__(self, reference: References, model: Path) -> None:
        self._reference = reference
        self._model = model

    def __call__(self, asks: Sequence[Ask | list[int]], max_tokens: int = 8) -> list[list[int]]:
        engine = self._reference.engine(self._model, dtype="float32")
        return tokens(engine.generate(asks, max_tokens=max_tokens, concurrency=16))


@pytest.fixture(scope="module")
def truth(tiny: Path, reference: References) -> Truth:
    """In float32."""
    return Truth(reference, tiny)


def connector_for(s3: S3Server, bucket: str) -> dict[str, Any]:
    """A kv_transfer_config. The engine also needs `env=s3.env`, which `serve` gives it."""
    return {
        "kv_connector": "S3KVConnector",
        "kv_connector_module_path": "s3kv.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "bucket": bucket,
            "endpoint_url": s3.url,
            "host_bytes": "256MiB",
        },
    }


def changed(connector: dict[str, Any], **settings: Any) -> dict[str, Any]:
    extra = connector["kv_connector_extra_config"] | settings
    return connector | {"kv_connector_extra_config": extra}


def patient_for(s3: S3Server, bucket: str, *, fails: bool = False) -> dict[str, Any]:
    """Settings with which neither hits nor saves depend on time: one block per chunk, a wait for
    every chunk however slow the machine is, and one probe at a time.

    fails: the store may leave requests without an answer. Otherwise an answer may take very long:
    ranks that spin while they wait for each other leave the server without a processor.
    """
    settings: dict[str, Any] = {
        "chunk_tokens": 128,
        "recompute_gate": False,
        "max_wait_ms": 250_000,
        "probe_chunks": 1,
    }
    if not fails:
        settings["request_timeout_ms"] = 480_000
    return changed(connector_for(s3, bucket), **settings)


@pytest.fixture
def patient(s3: S3Server, bucket: str) -> dict[str, Any]:
    """The same for this test's bucket, in a store that never fails."""
    return patient_for(s3, bucket)


class Serve:
    """`with serve(tiny, connector) as engine`: an engine that is audited before it is shut down.

    When the block has succeeded and the engine still lives, nothing may be left of its requests:
    no lease, no slot reserved or dirty, no job, no device block, no internal error; and after the
    shutdown no process and no file in /dev/shm. `at_rest=False` leaves out what only a reachable
    bucket lets end (dirty slots and their jobs).
    """

    def __init__(self, s3: S3Server, directory: Path) -> None:
        self._env = s3.env
        self._directory = directory
        self._count = 0

    @contextlib.contextmanager
    def __call__(
        self,
        model: Path,
        connector: dict[str, Any],
        *,
        at_rest: bool = True,
        env: dict[str, str] | None = None,
        **engine_args: Any,
    ) -> Iterator[Engine]:
        self._count += 1
        log = self._directory / f"engine-{self._count}.log"
        in_process = engine_args.get("in_process", True)
        engine = Engine(
            model, connector=connector, log_path=log, env=self._env | (env or {}), **engine_args
        )
        with engine:
            yield engine
            processes = engine.processes()
            processes += [p for parent in processes for p in parent.children(recursive=True)]
            alive = bool(processes)
            if alive:
                assert engine.metrics().get("vllm:s3kv_internal_errors_total", 0) == 0
            if alive and in_process:
                check_at_rest(engine.call("lab.audit:audit"), at_rest=at_rest)
            shared = shared_files([process.pid for process in processes])
        assert [p for p in processes if p.is_running() and p.status() != "zombie"] == []
        assert [name for name in shared if Path(name).exists()] == []


Launch = Callable[..., Engine]
"""`with launch(tiny, patient, tensor_parallel_size=2) as engine`: an engine whose core and ranks
are processes of their own, as those of a server."""


@pytest.fixture
def launch(s3: S3Server, tmp_path: Path) -> Launch:
    numbers = itertools.count(1)

    def engine(model: Path, connector: dict[str, Any] | None, **engine_args: Any) -> Engine:
        log = tmp_path / f"ranks-{next(numbers)}.log"
        args = {"in_process": False} | engine_args
        return Engine(model, connector=connector, log_path=log, env=s3.env, **args)

    return engine


def at_rest(engine: Engine) -> Counter[str]:
    """All counters of an engine (in_process), which has to be at rest now."""
    report = engine.call("lab.audit:audit")
    check_at_rest(report)
    return Counter(report["rank"]) | Counter(report["planner"])


class Aborts:
    """Requests that are given up at a moment, and the next ones with the same prompts."""

    def __init__(self, engine: Engine, truth: Truth) -> None:
        self._engine, self._truth = engine, truth

    def at(self, moment: str, prompt: list[int], hog: Sequence[int] = ()) -> int:
        """As `tests.system.e2e.inside.abort_at`."""
        target = "tests.system.e2e.inside:abort_at"
        return int(self._engine.call(target, moment=moment, prompt=prompt, hog=hog))

    def still_right(self, prompt: list[int]) -> int | None:
        """Whether the next request is answered as if the other had not been there, and leaves
        nothing behind. Returns the tokens that it hit."""
        (answer,) = self._engine.generate([prompt])
        assert [answer.tokens] == self._truth([prompt])
        at_rest(self._engine)
        return answer.cached_tokens

    def at_any_moment(
        self, stored: Sequence[list[int]], new: Sequence[list[int]], hog: list[int], blocks: int
    ) -> None:
        """Three prompts whose KV is in the bucket, and two new ones. The engine has `blocks`."""
        waiting, offered, loading = stored
        chunks = len(loading) // 128
        (io_process,) = self._engine.io_processes()
        io_process.send_signal(signal.SIGSTOP)
        assert self.at("waiting", waiting) == 0
        io_process.send_signal(signal.SIGCONT)
        assert self.still_right(waiting) == chunks * 128
        # Offered, but the engine has no room for it.
        assert self.at("offered", offered, hog) < blocks
        assert self.still_right(offered) == chunks * 128
        # While its blocks are being written, they stay its own.
        assert self.at("loading", loading) >= chunks
        assert self.still_right(loading) == chunks * 128
        for moment, prompt in zip(("computing", "decoding"), new, strict=True):
            self.at(moment, prompt)
            self.still_right(prompt)


def in_every_tier(
    serve: Serve,
    model: Path,
    connector: dict[str, Any],
    asks: Sequence[Ask | list[int]],
    **engine_args: Any,
) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Answers of a new engine, of the same one from host memory, and of another from the bucket."""
    with serve(model, connector, **engine_args) as engine:
        cold = engine.generate(asks)
        at_rest(engine)
        engine.reset_prefix_cache()
        host = engine.generate(asks)
        at_rest(engine)
    with serve(model, connector, **engine_args) as engine:
        warm = engine.generate(asks)
        at_rest(engine)
    return cold, host, warm


def check_tiers(
    found: Sequence[Sequence[Answer]], expected: list[list[int]], hit: int, *, cold: bool = True
) -> None:
    """Whether the answers of `in_every_tier` are those expected, and only the first computed the
    first `hit` tokens. cold: whether the tokens of the first are compared, too."""
    for number, answers in enumerate(found):
        assert cached(answers) == [hit if number else 0] * len(answers)
        assert not (number or cold) or tokens(answers) == expected


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached(answers: Sequence[Answer]) -> list[int | None]:
    return [answer.cached_tokens for answer in answers]


def answered(answers: Sequence[Answer]) -> tuple[list[int | None], list[list[int]]]:
    return cached(answers), tokens(answers)


def check_at_rest(report: dict[str, Any], *, at_rest: bool = True) -> None:
    assert report["broken"] == [], report
    outstanding = () if at_rest else ("jobs", "dirty")
    left = {name: n for name, n in report["left"].items() if n and name not in outstanding}
    assert left == {}, report


def slabs(process: psutil.Process) -> set[str]:
    """The inodes of the slabs that a process maps."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in maps if "memfd:s3kv-slab" in line}
    return set()


@pytest.fixture(scope="session")
def serve(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    return Serve(s3, tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def pictures(s3: S3Server, models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return Pictures(s3, vision.build(models_dir), tmp_path_factory.mktemp("pictures"))


@dataclass(frozen=True)
class Rig:
    """What most tests take: the fixtures of these names, with its own bucket and folder."""

    tiny: Path
    models_dir: Path
    tmp_path: Path
    s3: S3Server
    bucket: str
    patient: dict[str, Any]
    serve: Serve
    launch: Launch
    reference: References
    truth: Truth

    def objects(self) -> dict[str, int]:
        """The key and the bytes of each object in the bucket."""
        return self.s3.objects(self.bucket)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(*(request.getfixturevalue(field.name) for field in dataclasses.fields(Rig)))
