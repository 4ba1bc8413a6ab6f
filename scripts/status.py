"""The table at the top of README.md and docs/quickstart.md: what s3kv has run on, and what not.

A row says "run" only if its evidence is there: a result that a run has recorded, or the tests that
run on it. So the table changes when the first result of a GPU or of AWS is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scripts.compatibility import CONTINUOUS, Result, families, recorded, summary
from scripts.marks import filled
from scripts.results import speed

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the table.

    evidence: patterns of files from the root; one match each makes it true. run: what has been run.
    otherwise: the state without evidence.
    """

    what: str
    evidence: tuple[str, ...]
    run: str
    otherwise: str = "**not yet run**"


CLAIMS = (
    Claim(
        "Ceph RADOS Gateway",
        ("benchmarks/results/engine-rgw.json", "tests/rgw.py"),
        "run: tests and benchmarks",
    ),
    Claim("moto, a simulated S3", ("tests/servers.py",), "run with every change: every test"),
    Claim(
        "Terraform",
        ("tests/system/infra/test_applied.py",),
        "run: applied to moto, and used from there. **Not yet applied to AWS**",
    ),
    Claim(
        "GPUs (CUDA)",
        ("benchmarks/results/gpu-*.json",),
        "run",
        "**not yet run**: written from vLLM's source, with tests that want a GPU",
    ),
    Claim("AWS S3", ("benchmarks/results/*-aws.json",), "run"),
    Claim(
        "MinIO, R2, Google Cloud Storage, S3 Express",
        ("benchmarks/results/*-minio.json",),
        "run",
        "read only: their documentation; **not yet run**",
    ),
    Claim(
        "Kubernetes, the image",
        ("benchmarks/results/kubernetes-*.json",),
        "run",
        "manifests validated against the schemas, the image built on a stand-in for vLLM's; "
        "**not yet run**",
    ),
)


def readme() -> str:
    """README.md."""
    results = recorded()
    parts = {
        "status": table(results),
        "versions": summary(results),
        "families": families(results),
        "speed": speed(),
    }
    return filled(ROOT / "README.md", parts)


def quick_start() -> str:
    """docs/quickstart.md."""
    return filled(ROOT / "docs" / "quickstart.md", {"status": table(recorded())})


def table(results: list[Result], root: Path = ROOT) -> str:
    """The table. results: the recorded runs on versions of vLLM, the oldest first."""
    first, second = (_versions(results, runner) for runner in ("first", "second"))
    rows = [
        ("vLLM on a CPU, first-generation model runner", first),
        ("the same, second-generation model runner, interpreted kernels", second),
    ]
    rows += [(claim.what, _state(claim, root)) for claim in CLAIMS]
    lines = ["| | state |", "|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {state} |" for what, state in rows)])


def _state(claim: Claim, root: Path) -> str:
    found = all(any(root.glob(pattern)) for pattern in claim.evidence)
    return claim.run if found else claim.otherwise


def _versions(results: list[Result], runner: str) -> str:
    """What has run on this runner; tests that start no engine count with the first."""
    told = []
    for result in results:
        cells = [c for c in result["cells"] if (c["runner"] == "second") == (runner == "second")]
        passed = sum(cell["passed"] for cell in cells)
        if passed and result["vllm"] != CONTINUOUS:
            told.append(f"{result['vllm']} ({passed:,} test{'s' if passed > 1 else ''})")
    part = f"; run in part: {', '.join(told)}" if told else ""
    return f"run with every change: {CONTINUOUS}{part}"
