"""A real browser, for tests of pages: where it is, on which screens, and how to see that a page can be read.

The fixture `browser` of tests/conftest.py starts it.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SCREENS = [(width, theme) for width in (360, 1280) for theme in ("light", "dark")]

IN_A_BROWSER = [
    pytest.mark.alone,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here"),
]
"""Marks of a module that opens pages."""

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


def faults_of(page: Page) -> dict[str, Any]:
    """What keeps an open page from being read; every value is empty for a good page."""
    texts = page.evaluate(TEXTS)
    return {
        "too few texts": max(0, 31 - len(texts)),
        "overlaps": overlapping(texts),
        "contrast": [text for text in texts if text["contrast"] < 4.5],
        "size": [text for text in texts if text["size"] < 9],
        "sideways": page.evaluate(
            "Math.max(0, document.documentElement.scrollWidth - document.documentElement.clientWidth)"
        ),
    }


def spoil(page: Page, style: str) -> None:
    """Add a rule to the style of a page, to see that its faults are seen."""
    page.evaluate(
        "rule => { const sheet = document.styleSheets[0]; sheet.insertRule(rule, sheet.cssRules.length) }", style
    )
