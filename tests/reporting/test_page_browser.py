"""The page in a real browser: nothing overlaps, everything can be read, nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.browsing import IN_A_BROWSER, SCREENS, faults_of, spoil
from tests.reporting.examples import page_of

NAMES = ("rich", "from_csv", "empty", "hostile")

pytestmark = IN_A_BROWSER


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: _write(folder / f"{name}.html", page_of(name)) for name in NAMES}


def _write(path: Path, page: str) -> Path:
    path.write_text(page, encoding="utf-8")
    return path


def _open(browser: Browser, path: Path, width: int, theme: Any) -> tuple[Page, list[str]]:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    return page, requests


@pytest.mark.parametrize(("width", "theme"), SCREENS)
@pytest.mark.parametrize("name", NAMES)
def test_the_page_can_be_read(name: str, width: int, theme: str, browser: Browser, files: dict[str, Path]) -> None:
    page, requests = _open(browser, files[name], width, theme)
    faults = faults_of(page)
    page.close()
    assert not any(faults.values()), faults
    assert requests == [files[name].as_uri()]


@pytest.mark.parametrize(("width", "shown"), [(360, "narrow"), (1280, "wide")])
def test_one_picture_of_each_kind_is_shown(width: int, shown: str, browser: Browser, files: dict[str, Path]) -> None:
    page, _ = _open(browser, files["rich"], width, "light")
    visible = [picture.get_attribute("class") for picture in page.locator("svg").all() if picture.is_visible()]
    page.close()
    assert visible == [f"curve-{shown}", f"memory-{shown}"]


SPOILERS = (
    ("h1 { margin-bottom: -40px }", "overlaps"),
    (".muted { color: #aaaaaa !important }", "contrast"),
    (".box { width: 2000px; max-width: none }", "sideways"),
    ("svg text { font-size: 30px !important }", "overlaps"),
    ("svg text { font-size: 4px !important }", "size"),
)


@pytest.mark.parametrize(("style", "fault"), SPOILERS)
def test_faults_are_seen(style: str, fault: str, browser: Browser, files: dict[str, Path]) -> None:
    """The checks above turn red when the page is spoilt."""
    page, _ = _open(browser, files["rich"], 360, "light")
    spoil(page, style)
    faults = faults_of(page)
    page.close()
    assert faults[fault]
