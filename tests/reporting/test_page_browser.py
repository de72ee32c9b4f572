"""The page in a real browser: nothing overlaps, everything can be read, nothing is fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.reporting.examples import page_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NAMES = ("rich", "from_csv", "empty", "hostile")
SCREENS = [(width, theme) for width in (360, 1280) for theme in ("light", "dark")]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here"),
]

TEXTS = """
() => {
  const luminance = rgb => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const colour = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const opaque = rgba => rgba.length === 3 || (rgba.length === 4 && rgba[3] === 1);
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const found = colour(getComputedStyle(at).backgroundColor);
      if (opaque(found)) return found;
    }
    return [255, 255, 255];
  };
  const contrast = (a, b) => {
    const [dark, light] = [luminance(a.slice(0, 3)), luminance(b.slice(0, 3))].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const found = [];
  const add = (element, text, box, ink) => {
    if (text.trim() && box.width > 0 && box.height > 0) found.push({
      text: text.trim().slice(0, 60), contrast: contrast(colour(ink), ground(element)),
      size: parseFloat(getComputedStyle(element).fontSize) * (element.getScreenCTM ? element.getScreenCTM().a : 1),
      left: box.left, right: box.right, top: box.top, bottom: box.bottom,
      height: box.height,
    });
  };
  for (const element of document.querySelectorAll("svg text"))
    add(element, element.textContent, element.getBoundingClientRect(), getComputedStyle(element).fill);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (element.closest("svg")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) add(element, node.textContent, box, getComputedStyle(element).color);
  }
  return found;
}
"""
"""Every visible line of text, in HTML and in SVG, with its box, its contrast and its size in CSS pixels."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


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


def overlapping(texts: list[dict[str, Any]], slack: float = 0.2) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes share more than ``slack`` of the lower one's height, and more than two pixels across.

    A box holds the line's leading as well, so that neighbours may touch by a little without any ink meeting.
    """
    pairs = []
    ordered = sorted(texts, key=lambda text: float(text["top"]))
    for index, one in enumerate(ordered):
        for two in ordered[index + 1 :]:
            if two["top"] >= one["bottom"]:
                break
            high = min(one["bottom"], two["bottom"]) - max(one["top"], two["top"])
            wide = min(one["right"], two["right"]) - max(one["left"], two["left"])
            if high > slack * min(one["height"], two["height"]) and wide > 2:
                pairs.append((one["text"], two["text"]))
    return pairs


@pytest.mark.parametrize(("width", "theme"), SCREENS)
@pytest.mark.parametrize("name", NAMES)
def test_the_page_can_be_read(name: str, width: int, theme: str, browser: Browser, files: dict[str, Path]) -> None:
    page, requests = _open(browser, files[name], width, theme)
    texts = page.evaluate(TEXTS)
    sideways = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    page.close()
    assert len(texts) > 30
    assert overlapping(texts) == []
    assert [text for text in texts if text["contrast"] < 4.5] == []
    assert [text for text in texts if text["size"] < 9] == []
    assert sideways <= 0
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
    page.evaluate("style => document.head.appendChild(Object.assign(document.createElement('style'), "
                  "{textContent: style}))", style)  # fmt: skip
    texts = page.evaluate(TEXTS)
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    page.close()
    faults = {
        "overlaps": bool(overlapping(texts)),
        "contrast": any(text["contrast"] < 4.5 for text in texts),
        "size": any(text["size"] < 9 for text in texts),
        "sideways": wide > 0,
    }
    assert faults[fault]
