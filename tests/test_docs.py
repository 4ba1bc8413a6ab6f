"""The documentation says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import render_docs


@pytest.mark.parametrize("path", render_docs.documents())
def test_what_follows_from_the_code_is_current(path: str) -> None:
    written = (render_docs.ROOT / path).read_text()
    assert written == render_docs.documents()[path](), "run: python -m scripts.render_docs"


def test_links_between_documents_lead_somewhere() -> None:
    import re

    root = render_docs.ROOT
    for document in [*root.glob("*.md"), *root.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / Path(target)).exists(), f"{document.name}: {target}"
