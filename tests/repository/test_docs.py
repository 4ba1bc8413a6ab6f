"""The documentation says what the code does, its pictures show what the code's tables hold, and the
results that it shows name the commits that gave them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.origin import commit
from benchmarks.simulation.fleet import Setup
from s3kv.cli.app import cli
from s3kv.config import Config
from s3kv.host.table import TRANSITIONS, EntryState
from s3kv.metrics import EC_METRICS, KV_METRICS, TIER_METRICS
from s3kv.planning.requests import REQUEST_TRANSITIONS, RequestState
from scripts import costs, marks, render_docs, results
from tests.project import ROOT
from tests.servers import KEYS, REGION, boto_client, moto_server, set_credentials


@pytest.mark.parametrize("path", render_docs.documents())
def test_what_follows_from_the_code_is_current(path: str) -> None:
    written = (render_docs.ROOT / path).read_text()
    assert written == render_docs.documents()[path](), "run: python -m scripts.render_docs"


DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "terraform/*.md")
    for path in render_docs.ROOT.glob(pattern)
)


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_file_of_the_repository_that_is_named_exists() -> None:
    """By its path from the root or from s3kv/. The changelog tells of files that are gone."""
    root, missing = render_docs.ROOT, []
    named = re.compile(r"`([a-z0-9_]+/[A-Za-z0-9_/.-]+\.(?:py|sh|md))`")
    for document in DOCUMENTS:
        for path in named.findall(document.read_text()):
            places = (root / path, root / "s3kv" / path, document.parent / path)
            if document.name != "CHANGELOG.md" and not any(place.exists() for place in places):
                missing.append(f"{document.relative_to(root)}: {path}")
    assert missing == []


def test_the_readme_leads_to_every_document_and_shows_pictures() -> None:
    readme = (render_docs.ROOT / "README.md").read_text()
    documents = {f"docs/{path.name}" for path in (render_docs.ROOT / "docs").glob("*.md")}
    assert documents - set(re.findall(r"\]\(([^)#]+)", readme)) == set()
    pictures = {f"docs/pictures/{p.name}" for p in render_docs.ROOT.glob("docs/pictures/*")}
    shown = "".join(document.read_text() for document in DOCUMENTS)
    assert [p for p in pictures if p.removeprefix("docs/") not in shown] == []
    assert set(re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)) & pictures


def test_every_command_shown_is_one() -> None:
    """`s3kv COMMAND --option` anywhere in a document: command and options exist."""
    shown = 0
    for document in DOCUMENTS:
        for name, rest in re.findall(r"\bs3kv ([a-z]+)((?: [^\s`|$#]+)*)", document.read_text()):
            options = re.findall(r"--[a-z-]+", rest)
            if name not in cli.commands:
                assert not options, f"{document.name}: s3kv {name}{rest}"
                continue
            known = {o for p in cli.commands[name].params for o in (*p.opts, *p.secondary_opts)}
            if name != "serve":  # it passes on what it does not know
                assert set(options) <= {*known, "--help"}, f"{document.name}: s3kv {name}{rest}"
            shown += bool(options)
    assert shown > 5


def check_offloading(extra: dict[str, Any]) -> None:
    """s3kv is the last tier, without the settings that are vLLM's there (`tier_setup.REPLACED`)."""
    settings = extra["secondary_tiers"][-1]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert isinstance(extra["cpu_bytes_to_use"], int)
    assert settings.pop("type") == "s3kv"
    assert not settings.keys() & {"host_bytes", "chunk_tokens", "share_ranks"}
    Config.parse(settings)


@pytest.mark.parametrize("kind", ["kv", "ec"])
def test_every_transfer_config_shown_is_valid(kind: str) -> None:
    shown = [
        json.loads(text)
        for document in DOCUMENTS
        for text in re.findall(
            rf"--{kind}-transfer-config '(\{{.*?\}})'", document.read_text(), re.DOTALL
        )
    ]
    assert shown
    for transfer in shown:
        if transfer[f"{kind}_connector"] == "OffloadingConnector":
            check_offloading(transfer["kv_connector_extra_config"])
            continue
        if transfer[f"{kind}_connector"] == "MultiConnector":  # s3kv is the last of several
            transfer = transfer["kv_connector_extra_config"]["connectors"][-1]
        assert transfer[f"{kind}_connector"] == f"S3{kind.upper()}Connector"
        Config.parse(transfer[f"{kind}_connector_extra_config"])


def test_the_quick_start_finds_the_hits_of_a_tier() -> None:
    page = (render_docs.ROOT / "docs/quickstart.md").read_text()
    (pattern,) = re.findall(r"/metrics \| grep(?: -E)? '?([^'\n]+)", page)
    assert any(re.search(pattern, f"vllm:s3kv_{name}") for name in TIER_METRICS)


def test_every_metric_named_exists() -> None:
    tables = (("vllm:s3kv_", KV_METRICS), ("vllm:s3kv_ec_", EC_METRICS))
    known = {
        f"{namespace}{name}{'_total' if metric.kind == 'counter' else ''}"
        for namespace, table in tables
        for name, metric in table.items()
    }
    named = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"vllm:s3kv_[a-z0-9_]*[a-z0-9]\b(?!_)", document.read_text())
    }
    assert len(named) > 100  # the tables of docs/metrics.md
    assert named - known == set()


PICTURES = ROOT / "docs" / "pictures"
SLOTS = [(a.name, b.name, event) for event, moves in TRANSITIONS.items() for a, b in moves.items()]
REQUESTS = [(a.name, b.name, event.value) for (a, event), b in REQUEST_TRANSITIONS.items()]


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*")), ids=lambda path: path.stem)
def test_a_picture_is_well_formed_and_needs_nothing_from_elsewhere(path: Path) -> None:
    drawing = path.read_text()
    root = ET.fromstring(drawing)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # A screen reader says the title.
    assert root[0].tag.endswith("title")
    assert re.findall(r"href|url\(|@import|<script", drawing) == []


@pytest.mark.parametrize(
    ("name", "states", "moves"),
    [("slots", EntryState, SLOTS), ("requests", RequestState, REQUESTS)],
    ids=["slots", "requests"],
)
def test_the_states_and_events_of_a_picture_are_those_of_its_table(
    name: str, states: type[EntryState | RequestState], moves: Iterable[tuple[str, str, str]]
) -> None:
    """The events from one state to another are one text, those that leave it as it is another."""
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for begin, end, event in moves:
        edges[begin, end].append(event)
    said = [f"{'↻ ' * (a == b)}{', '.join(events)}" for (a, b), events in edges.items()]
    drawn = ET.fromstring((PICTURES / f"{name}.svg").read_text())
    shown = [str(element.text) for element in drawn.iter() if element.tag.endswith("}text")]
    assert sorted(shown) == sorted([*said, *(state.name for state in states)])


README = (ROOT / "README.md").read_text()
QUICK_START = (ROOT / "docs" / "quickstart.md").read_text()
LIBRARY = (ROOT / "docs" / "api.md").read_text().partition("<!-- BEGIN")[0]
EXAMPLES = re.findall(r"```python\n(.*?)```", LIBRARY, re.DOTALL)
MOST_LINES = 150


PRINTED = (
    ["Location(device=False, host=True, bucket=True)", "True 1.0"],
    ["computing", "0.25", "0.25"],
)
"""What the examples print, in the order they come."""


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_there_is_no_python_example_but_these() -> None:
    assert len(EXAMPLES) == len(PRINTED)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto_server() as url:
        boto_client(url, KEYS).create_bucket(Bucket="my-bucket")
        yield url


@pytest.mark.parametrize(("code", "printed"), list(zip(EXAMPLES, PRINTED, strict=False)))
def test_a_python_example_runs(
    code: str,
    printed: list[str],
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_credentials(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    exec(compile(code, "api.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == printed


def test_the_transfer_config_is_valid() -> None:
    (text,) = re.findall(r"--kv-transfer-config '(.*?)'", QUICK_START, re.DOTALL)
    transfer = json.loads(text)
    assert transfer["kv_connector"] == "S3KVConnector"
    config = Config.parse(transfer["kv_connector_extra_config"])
    example = (config.bucket_bytes / 2**30, config.host_bytes / 2**30)
    assert example == (Setup().bucket_gib, Setup().host_gib), "docs/cost.md bills the example"


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """The results that the documentation shows."""
    names: set[str] = set()
    recorded = marks.recorded

    def noted(name: str) -> dict[str, Any]:
        names.add(name)
        return recorded(name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (costs, results):
            patch.setattr(module, "recorded", noted)
        for render in (costs.page, results.page, results.peers_page, results.readme):
            render()
        return names


def test_every_result_that_is_shown_names_its_commit(shown: set[str]) -> None:
    """Of the result as a whole, or of each part that was measured by itself."""
    assert shown
    for name in sorted(shown):
        result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        parts: Any = [part for about, part in result.items() if about != "machine"]
        if "commit" in result:
            parts = [result]
        for part in parts:
            for one in part if isinstance(part, list) else [part]:
                assert re.fullmatch(r"[0-9a-f]{7,}\+?", one.get("commit", "")), name


def test_a_published_result_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import rig

    rig.publish({"benchmark": "engine", "measured": 1}, tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert result["commit"] == commit()
    assert all(speed > 0 for speed in result["computing"].values())
