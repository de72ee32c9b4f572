"""What every room's tests share: quiet threads, repeatable property tests, the published tables."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch or numpy load: one thread per test process, so that tests on a busy machine do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("microbatch", deadline=None, max_examples=60, derandomize="CI" in os.environ)
settings.load_profile("microbatch")


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
