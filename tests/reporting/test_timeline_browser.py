"""The page of a timeline in a real browser: nothing overlaps, everything can be read, nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from microbatch.pipeline.schedule import Schedule
from microbatch.pipeline.simulate import simulate
from microbatch.reporting.timeline_page import to_html
from tests.browsing import IN_A_BROWSER, SCREENS, faults_of

pytestmark = IN_A_BROWSER

SIZES = {"small": ("zb_h1", 4, 8), "large": ("one_f_one_b", 8, 64), "pairs": ("dualpipe_v", 4, 12)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("timelines")
    paths = {}
    for key, (name, p, m) in SIZES.items():
        timeline = simulate(Schedule.of(name, ranks=p, num_micro_batches=m), message=0.1, memory_limit=float(p))
        paths[key] = folder / f"{key}.html"
        paths[key].write_text(to_html(timeline), encoding="utf-8")
    return paths


@pytest.mark.parametrize(("width", "theme"), SCREENS)
@pytest.mark.parametrize("key", SIZES)
def test_the_page_can_be_read(key: str, width: int, theme: str, browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(pages[key].as_uri())
    faults = faults_of(page)
    page.close()
    assert not any(faults.values()), faults
    assert requests == [pages[key].as_uri()]
