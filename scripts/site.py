"""Build the documentation site: `python -m scripts.site [FOLDER]`.

The documents link to each other, and to files beside them, as they lie in the repository, so that
they read well there. So the site has the same folders: what may be linked to is copied to
FOLDER/pages (build/docs/pages), and Zensical makes FOLDER/site of that with the settings in
mkdocs.yml. Nothing asks anybody on the network, and neither do the pages.
"""

from __future__ import annotations

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
