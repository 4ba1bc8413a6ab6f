"""Text of the README for a package index, where links and pictures of the repository lead nowhere.

hatchling runs this when it builds, and no other module of the project is there then.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


def without_relative_links(text: str) -> str:
    """Markdown with the text of each relative link in its place, and without relative pictures."""
    return _LINK.sub(r"\1", _PICTURE.sub("", text))


class IndexPage(MetadataHookInterface):
    """The field `readme` of the distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}
