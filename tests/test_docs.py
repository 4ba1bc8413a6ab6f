"""The documentation says what the code does."""

from __future__ import annotations

from pathlib import Path

from scripts import render_docs


def test_the_table_of_settings_is_current() -> None:
    written = (render_docs.DOCS / "configuration.md").read_text()
    assert written == render_docs.configuration(), "run: python scripts/render_docs.py"


def test_the_help_of_the_command_line_is_current() -> None:
    written = (render_docs.DOCS / "cli.md").read_text()
    assert written == render_docs.command_line(), "run: python scripts/render_docs.py"


def test_links_between_documents_lead_somewhere() -> None:
    import re

    root = render_docs.DOCS.parent
    for document in [*root.glob("*.md"), *root.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / Path(target)).exists(), f"{document.name}: {target}"
