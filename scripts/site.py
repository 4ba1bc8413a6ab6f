"""Build the documentation site: `python -m scripts.site [FOLDER]`.

The documents link to each other, and to files beside them, as they lie in the repository, so that
they read well there. So the site has the same folders: what may be linked to is copied to
FOLDER/pages (build/docs/pages), and Zensical makes FOLDER/site of that with the settings in
mkdocs.yml. On the way, code that a document only indents gets a fence that names its language, for
its colours. Nothing asks anybody on the network, and neither do the pages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
SHOWN = (
    "*.md",
    "LICENSE",
    "benchmarks/results/*.json",
    "deploy/**/*",
    "docs/**/*",
    "terraform/*.md",
    "terraform/examples/*/*.tf",
)
"""What documents link to."""


def stage(pages: Path) -> None:
    """Copy what is shown to the folder `pages`, which is emptied first."""
    shutil.rmtree(pages, ignore_errors=True)
    for pattern in SHOWN:
        for source in sorted(ROOT.glob(pattern)):
            if source.is_file() and "__pycache__" not in source.parts:
                target = pages / source.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                if source.suffix == ".md":
                    target.write_text(fenced(source.read_text()))


_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
_LIST = re.compile(r"^ *([-*]|\d+\.) ", re.MULTILINE)
_SHELL = re.compile(
    r"(#|aws|cd|curl|docker|echo|export|kubectl|make|pip|python|s3kv|terraform|vllm|"
    r"[A-Z][A-Z0-9_]*=)\S* ?"
)
_LANGUAGES = (
    ("json", re.compile(r"[{\[]\s*[\"{\[\]}]")),
    ("console", re.compile(r"\$ ")),
    ("bash", _SHELL),
    ("python", re.compile(r"(from|import|with|async|def|class) \w|\w+ = \w+[.(]")),
)


def fenced(document: str) -> str:
    """The document with a fence around each indented block of code, and a language on each fence
    without one. A block in a list keeps its indent."""

    def fence(match: re.Match[str]) -> str:
        before = document[: match.start()].rstrip("\n").rpartition("\n\n")[2]
        if _LIST.match(before) or before.startswith("    "):
            return match[0]
        code = re.sub(r"^ {4}", "", match[0].rstrip("\n"), flags=re.MULTILINE)
        blank = match[0][len(match[0].rstrip("\n")) :]
        return f"```{language(code)}\n{code}\n```{blank}"

    parts = re.split(r"(^```.*?^```$)", document, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _INDENTED.sub(fence, part) for part in parts)


def language(code: str) -> str:
    """Name of the language that a block of code is most likely in."""
    return next((name for name, pattern in _LANGUAGES if pattern.match(code)), "text")


def build(folder: Path) -> Path:
    """The site, in `folder`. Raises `CalledProcessError` on the first warning, such as a link that
    leads nowhere."""
    stage(folder / "pages")
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    settings |= {"docs_dir": "pages", "site_dir": "site"}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False))
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict", "--clean"], cwd=folder, check=True)
    return folder / "site"


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs")
