"""Write docs/tour.md: `python -m scripts.tour` runs the demo, and the command line on its bucket.

It does what the demo tells its user to do in another terminal. What comes out differs a little
every time; `essence` leaves away what does, and a test compares the rest.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "docs" / "tour.md"
_WIDTH = "200"  # a key is not to be folded
_READY = "The bucket stays until you press Enter here."

_OPENING = """# A tour of the command line

`make demo KEEP=1` leaves the demo's bucket where it is until you press Enter, and prints what to
paste into another terminal: the keys of the bucket, and the commands. This page is what those
print, written by `python -m scripts.tour`; `tests/system/e2e/test_tour.py` does it all again and
compares. Block hashes are shortened here.
"""


@dataclass(frozen=True, slots=True)
class Stop:
    """A section of the tour: commands, run in order. {key} in one is the key of an object."""

    title: str
    text: str
    commands: tuple[str, ...]


STOPS = (
    Stop(
        "Is all well here?",
        "Each thing the cache does in a bucket is done once, and this host is looked at for what\n"
        "an engine needs.",
        ("s3kv doctor --config demo.json",),
    ),
    Stop(
        "What is in the bucket?",
        "Six prompts of 1,600 tokens are six chunks of 256 tokens each; what is left over is not\n"
        "saved.",
        (
            "s3kv ls --config demo.json",
            "s3kv ls --summary --config demo.json",
        ),
    ),
    Stop(
        "What is one object?",
        "A safetensors file. Its header says which chunk of which namespace it is, its digest\n"
        "that it is whole. `--stats` adds the range and mean of its numbers.",
        ("s3kv inspect {key} --config demo.json",),
    ),
    Stop(
        "Is everything as it was written?",
        "All of it is read back, and verified as an engine would.",
        ("s3kv verify --config demo.json",),
    ),
    Stop(
        "What would have to go?",
        "For stores without lifecycle rules. With `--dry-run` nothing is deleted.",
        ("s3kv gc --max-bytes 400MiB --dry-run --config demo.json",),
    ),
    Stop(
        "What does it cost?",
        "The counters of both engines, as if every hour of a month were like the demo, at the\n"
        "prices of AWS. The model is tiny, and so are its prompts.",
        (
            "s3kv cost --metrics first-metrics.txt --metrics second-metrics.txt --over 1h "
            "--gpu-dollars-per-hour 4 --prefill-tokens-per-s 8000",
        ),
    ),
    Stop(
        "How does an engine get it?",
        "What the demo gave its engines, to paste after `vllm serve`.",
        ("s3kv config --config demo.json",),
    ),
)


@contextmanager
def kept_demo() -> Iterator[tuple[Path, dict[str, str]]]:
    """The demo, once it waits for Enter: its directory, and the environment it says to export."""
    environment = {k: v for k, v in os.environ.items() if k not in ("S3KV_BUCKET", "KEEP")}
    demo = subprocess.Popen(
        [sys.executable, "-m", "demo", "--keep"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdin is not None
    assert demo.stdout is not None
    try:
        said = ""
        while "s3kv cost" not in said:
            line = demo.stdout.readline()
            if not line:
                raise RuntimeError(f"the demo ended before it said {_READY!r}:\n{said}")
            said += line
        pasted = said.partition(_READY)[2]
        (directory,) = re.findall(r"^ +cd (.+)$", pasted, re.MULTILINE)
        exports = dict(re.findall(r'^ +export (\w+)="(.*)"$', pasted, re.MULTILINE))
        exports.pop("PATH", None)
        yield Path(shlex.split(directory)[0]), environment | exports
    finally:
        demo.communicate("\n", timeout=60)


def render() -> str:
    """The page."""
    parts = [_OPENING]
    with kept_demo() as (directory, environment):
        key = _some_key(directory, environment)
        for stop in STOPS:
            commands = [command.format(key=key) for command in stop.commands]
            shown = [f"$ {c}\n{_run(c, directory, environment)}" for c in commands]
            text = "\n\n".join(shown)
            parts.append(f"## {stop.title}\n\n{stop.text}\n\n```console\n{text}\n```\n")
    return _shortened("\n".join(parts))


def _some_key(directory: Path, environment: dict[str, str]) -> str:
    listed = _run("s3kv ls --config demo.json --json", directory, environment)
    digest = re.findall(r"[0-9a-f]{32}", listed)[0]
    objects = _run(f"s3kv ls {digest} --config demo.json --json", directory, environment)
    return str(re.findall(r'"([^"]+\.safetensors)"', objects)[0])


def _run(command: str, directory: Path, environment: dict[str, str]) -> str:
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "s3kv.cli", *arguments],
        cwd=directory,
        env=environment | {"COLUMNS": _WIDTH, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join(lines).strip("\n")


def _shortened(text: str) -> str:
    """Block hashes as their first eight digits."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1…", text)


_VOLATILE: Sequence[tuple[str, str]] = (
    (r"[0-9a-f]{8}…|[0-9a-f]{32}", "HASH"),
    (r"/[0-9a-f]{2}/HASH", "/HH/HASH"),
    (r"s3kv-demo/[0-9a-f]{8}", "s3kv-demo/ID"),
    (r"/\S+/s3kv-demo-\w+/", "DIRECTORY/"),
    (r"127\.0\.0\.1:\d+", "HOST"),
    (r"torch \d.*?(?= ok| warning| ```)", "TORCH"),
    (r"vLLM \d\S*", "VLLM"),
    (r"[\d,]+ bytes are available", "N bytes are available"),
    (r"a process may lock .*?(?= ok| warning| ```)", "MEMLOCK"),
    (r"[\d.,]+ (ms|MB/s|min|h)\b", r"N \1"),
    (r"\d{4}-\d\d-\d\dT\S+", "TIME"),
)


def essence(page: str) -> str:
    """What of the page is the same every time: without white space, hashes, times and speeds, and
    without the numbers of the bill, which depend on how many requests a race needs."""
    text = re.sub(r"\s+", " ", page)
    for pattern, word in _VOLATILE:
        text = re.sub(pattern, word, text)
    head, cost, rest = text.partition("## What does it cost?")
    bill, more, tail = rest.partition("## How does an engine get it?")
    return head + cost + re.sub(r"[\d.,]+", "N", bill) + more + tail


if __name__ == "__main__":
    TOUR.write_text(render())
