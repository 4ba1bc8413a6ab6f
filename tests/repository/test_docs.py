"""The documentation says what the code does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from s3kv.cli.app import cli
from s3kv.config import Config
from s3kv.metrics import EC_METRICS, KV_METRICS, TIER_METRICS
from scripts import render_docs


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
