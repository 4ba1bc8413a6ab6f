"""The documentation site builds without a warning, leads nowhere wrong, and needs nobody else."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.project import ROOT

pytestmark = pytest.mark.xdist_group("site")


def pages(site: Path) -> dict[Path, str]:
    """Every page but the one for what is not found, which is served at any address."""
    return {p: p.read_text() for p in site.rglob("*.html") if p.name != "404.html"}


def references(page: str) -> set[str]:
    return {unescape(r) for r in re.findall(r'(?:href|src)="([^"]*)"', page)}


def test_every_document_is_a_page_and_in_the_menu(site: Path) -> None:
    def named(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [name for child in children for name in named(child)]  # type: ignore[attr-defined]

    menu = named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    documents = {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")}
    assert documents <= set(menu)
    assert len(menu) == len(set(menu))
    for name in menu:
        path = site / name
        built = path.parent if path.name == "README.md" else path.with_suffix("")
        assert (built / "index.html").is_file(), name


def test_every_reference_leads_to_something_that_is_there(site: Path) -> None:
    broken = []
    for page, text in pages(site).items():
        for reference in references(text):
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc or not parts.path:
                continue
            target = (page.parent / unquote(parts.path)).resolve()
            if parts.path.startswith("/"):
                target = site / parts.path.lstrip("/")
            found = target / "index.html" if target.is_dir() else target
            named = f'id="{unquote(parts.fragment)}"' if parts.fragment else ""
            if not found.is_file() or named not in found.read_text(errors="replace"):
                broken.append(f"{page.relative_to(site)}: {reference}")
    assert broken == []


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loading = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    for page, text in pages(site).items():
        assert loading.findall(text) == [], page
