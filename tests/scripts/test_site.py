"""Code in documents gets a fence with its language on the way to the site."""

from __future__ import annotations

import pytest

from scripts.site import fenced, language


def test_indented_code_gets_a_fence() -> None:
    assert fenced("Run it:\n\n    make demo\n\n    make test\n\nThen look.\n") == (
        "Run it:\n\n```bash\nmake demo\n\nmake test\n```\n\nThen look.\n"
    )


def test_the_end_of_a_document_ends_its_code() -> None:
    assert fenced("Run it:\n\n    make demo\n") == "Run it:\n\n```bash\nmake demo\n```\n"


@pytest.mark.parametrize(
    "document",
    [
        "- an item\n\n    its second paragraph\n",
        "1. an item\n\n    its second paragraph\n",
        "```yaml\na:\n\n    b\n```\n",
        "No code at all.\n",
    ],
)
def test_nothing_else_changes(document: str) -> None:
    assert fenced(document) == document


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('{"bucket": "b"}', "json"),
        ("$ s3kv ls\n", "console"),
        ("S3KV_BUCKET=b make demo", "bash"),
        ("vllm serve my-model", "bash"),
        ("from s3kv import TieredStore", "python"),
        ("the beginning of a sentence", "text"),
    ],
)
def test_a_language_is_recognised(code: str, name: str) -> None:
    assert language(code) == name
