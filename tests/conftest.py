"""What every room's tests share: quiet threads, repeatable property tests, the published tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch or numpy load: one thread per test process, so that tests on a busy machine do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from collections.abc import Generator

import pytest
from hypothesis import settings

from tests.turns import turn

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("microbatch", deadline=None, max_examples=60, derandomize="CI" in os.environ)
settings.load_profile("microbatch")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests marked `alone` run with none beside them."""
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def published_data() -> Path:
    """The folder of published tables: MICROBATCH_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("MICROBATCH_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "gemm-latency.csv").is_file():
        pytest.skip("the published tables are not here; set MICROBATCH_DATA to their folder")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real one, for one module: as long as it is open its thread can run no event loop of its own."""
    from playwright.sync_api import sync_playwright

    from tests.browsing import ARGUMENTS, CHROMIUM

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()
