"""The documentation site in a browser: on a phone, a laptop and a wide screen, light and dark.

Screenshots of some pages are left in build/screenshots.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.project import ROOT, skip_or_fail

pytestmark = [pytest.mark.infra, pytest.mark.xdist_group("site")]
PHONE, LAPTOP, WIDE = 390, 1300, 1920
WIDTHS = (PHONE, LAPTOP, WIDE)
LOOK = Path(__file__).with_name("boxes.js").read_text().partition("\n")[2]
SHOTS = ROOT / "build" / "screenshots"
PICTURED = ("index", "docs/configuration/index", "docs/comparison/index",
            "docs/architecture/index")  # fmt: skip
READABLE_PX = 11
LIMIT_MS = 200_000
"""For a browser that hangs; a slow machine is given the time it needs."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's headless Chromium. Without it the tests are skipped, on CI they fail."""
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        skip_or_fail("no browser (Debian's package: chromium-headless-shell), or no playwright")
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, timeout=LIMIT_MS)
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=WIDTHS)
def looked_at(request: pytest.FixtureRequest, browser: Any, site: Path) -> dict[str, Any]:
    """What `boxes.js` tells of every page at one width, by the page's path."""
    found: dict[str, Any] = {"width": request.param}
    page = opened(browser, request.param)
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        name = str(path.relative_to(site).with_suffix(""))
        found[name] = page.evaluate(LOOK)
        if name in PICTURED:
            shot = SHOTS / str(request.param) / f"{name.removesuffix('/index')}.png"
            page.screenshot(path=shot, full_page=True)
    page.close()
    return found


def opened(browser: Any, width: int, scheme: str = "light") -> Any:
    page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page.set_default_timeout(LIMIT_MS)
    return page


def pages(looked_at: dict[str, Any]) -> dict[str, Any]:
    return {name: told for name, told in looked_at.items() if name != "width"}


def test_nothing_leaves_its_box_on_any_page(looked_at: dict[str, Any]) -> None:
    assert len(pages(looked_at)) > 40
    assert {name: told["told"] for name, told in pages(looked_at).items() if told["told"]} == {}


def test_code_that_does_not_fit_would_be_noticed(browser: Any, site: Path) -> None:
    page = opened(browser, LAPTOP)
    page.goto((site / "index.html").as_uri())
    page.add_style_tag(content=".md-typeset pre > code { white-space: pre; font-size: 2em }")
    told = page.evaluate(LOOK)["told"]
    page.close()
    assert any(one.startswith("code") for one in told), told


def test_the_text_has_the_room_there_is(looked_at: dict[str, Any]) -> None:
    least = {PHONE: 330, LAPTOP: 950, WIDE: 1100}[looked_at["width"]]
    narrow = {n: told["column"] for n, told in pages(looked_at).items() if told["column"] < least}
    assert narrow == {}


def test_the_name_of_a_setting_stays_whole(looked_at: dict[str, Any]) -> None:
    assert {name: told["broken"] for name, told in pages(looked_at).items() if told["broken"]} == {}


def test_the_letters_of_pictures_can_be_read(looked_at: dict[str, Any]) -> None:
    shown = {name: scale for told in pages(looked_at).values() for name, scale in told["pictures"]}
    drawn = {path.name: path for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert shown.keys() == drawn.keys()
    for name, path in drawn.items():
        smallest = min(
            float(size) for size in re.findall(r"font-size='([\d.]+)'", path.read_text())
        )
        assert shown[name] * smallest >= READABLE_PX, name


def test_code_has_colours(looked_at: dict[str, Any]) -> None:
    """Prose and listings have none; commands, settings and programs do."""
    for name in ("index", "docs/quickstart/index", "docs/api/index", "terraform/index"):
        assert max(pages(looked_at)[name]["colours"]) > 1, name


def test_the_first_code_of_the_home_page_has_colours(looked_at: dict[str, Any]) -> None:
    assert pages(looked_at)["index"]["colours"][0] > 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_and_pictures_follow_the_preference(browser: Any, site: Path, scheme: str) -> None:
    page = opened(browser, LAPTOP, scheme)
    page.goto((site / "index.html").as_uri())
    told = page.evaluate(LOOK)
    page.screenshot(path=SHOTS / scheme / "index.png", full_page=True)
    papers = {"page": max(told["paper"])}
    for picture in sorted((ROOT / "docs" / "pictures").glob("*.svg")):
        page.set_content(picture.read_text())
        fill = page.evaluate("() => getComputedStyle(document.querySelector('rect')).fill")
        papers[picture.name] = max(map(int, re.findall(r"\d+", fill)[:3]))
    page.close()
    assert max(told["colours"]) > 1
    if scheme == "dark":
        assert max(papers.values()) < 80, papers
    else:
        assert min(papers.values()) > 200, papers
