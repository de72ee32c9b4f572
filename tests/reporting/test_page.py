"""The page as text: whole, safe, small."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from microbatch.curves.codec import load_profile
from microbatch.reporting.page import MOST_BYTES, to_html, to_notebook
from tests.reporting import examples
from tests.reporting.examples import page_of

NAMES = ("rich", "from_csv", "empty", "hostile", "large")
VOID = {"meta", "br", "path", "use", "rect", "link", "img"}


class Reader(HTMLParser):
    """Collects the text, the tags and every address, and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.addresses: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


@pytest.mark.parametrize("name", NAMES)
def test_the_page_stands_alone(name: str) -> None:
    page = page_of(name)
    reader = read(page)
    assert len(page.encode()) <= MOST_BYTES <= 1_000_000
    assert "http:" not in page and "https:" not in page
    assert "//" not in re.sub(r"json,[^\"]*", "", page)
    assert {"script", "img", "iframe", "link", "object"}.isdisjoint(reader.tags)
    assert all(address.startswith(("#", "data:application/json")) for address in reader.addresses)
    assert len(reader.ids) == len(set(reader.ids))
    assert all(address[1:] in reader.ids for address in reader.addresses if address.startswith("#"))


@pytest.mark.parametrize("name", NAMES)
def test_every_raw_sample_is_inside(name: str, tmp_path: Path) -> None:
    data = re.search(r'href="data:application/json,([^"]*)"', page_of(name))
    assert data
    path = tmp_path / "profile.json"
    path.write_text(unquote(unescape(data[1])), encoding="utf-8")
    assert load_profile(path).points == getattr(examples, name)().profile.points
    assert json.loads(path.read_bytes())["recommended"]["batch_size"] == (8 if name == "empty" else 392)


SENTENCES = (
    "Use batch 392.", "98\u00a0% of best", "Pad to 168 or stay at 128.", "Dominant layer: layers.0.up",
    "What the words mean", "Experts", "108 run at once", "cgroup limit", "ridge 109 (101-118)",
)  # fmt: skip


def test_the_page_says_what_the_summary_says() -> None:
    text = read(page_of("rich")).text
    for sentence in SENTENCES:
        assert sentence in text


def test_a_hostile_name_stays_text() -> None:
    assert "<script" not in page_of("hostile").lower()
    assert "</script><script>alert(1)</script> $x_2$" in read(page_of("hostile")).text
    assert "\x00" not in page_of("hostile") and "\x1b" not in page_of("hostile")


def test_with_too_many_samples_the_data_stays_out_and_the_page_says_so() -> None:
    page = to_html(examples.large(count=400, repeats=200))
    assert len(page.encode()) <= MOST_BYTES
    assert "too many samples" in page and "data:application" not in page
    assert re.search(r"20[01] of 400 sizes are shown", page)


def test_notebook_form_is_one_cell() -> None:
    form = to_notebook(examples.hostile())
    reader = read(form)
    assert reader.tags[0] == "div" and "svg" in reader.tags and "script" not in reader.tags
    assert "Use batch 392." in reader.text
    assert "var(--" not in form
