"""A load report as text, picture, page, JSON and CSV."""

from __future__ import annotations

import csv
import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from microbatch.errors import InvalidSettings
from microbatch.reporting.load_forms import FORMS, to_html
from microbatch.reporting.load_picture import curve_of, draw
from microbatch.reporting.save import save
from microbatch.reporting.text import to_text
from microbatch.web.load.result import LoadReport, Run, run_of
from microbatch.web.load.tally import Tally
from microbatch.web.load.verdict import sentence

HOSTILE = "</script><script>alert(1)</script> $x_2$"


def run_at(rate: float, *, fails: int = 0, latency: float = 0.01, cpu: float = 0.2) -> Run:
    noise = random.Random(1)
    tally = Tally(window=1.0, until=1.0, target=0.05)
    for k in range(round(rate)):
        due = k / rate
        tally.begin(due, due)
        tally.finish(due, due + latency * noise.lognormvariate(0, 0.5), 503 if k < fails else 200, HOSTILE)
    return run_of(tally, clients=None, rate=rate, cpu_seconds=cpu, elapsed=1.0, connections=8)


def report_of(*runs: Run) -> LoadReport:
    return LoadReport(url="http://127.0.0.1:8000/predict", traffic="poisson", target=0.05, runs=runs,
                      verdict=sentence(runs, 0.05))  # fmt: skip


REPORTS = {
    "one": report_of(run_at(200)),
    "several": report_of(run_at(100), run_at(200), run_at(400, latency=0.2)),
    "failing": report_of(run_at(200, fails=20)),
    "void": report_of(run_at(200, cpu=0.97)),
    "unanswered": report_of(run_at(20, fails=20)),
}


@pytest.mark.parametrize("name", REPORTS)
def test_text_fits_a_terminal_and_leads_with_the_sentence(name: str) -> None:
    lines = to_text(REPORTS[name]).split("\n")
    assert lines[0] == REPORTS[name].verdict
    assert all(len(line) <= 120 for line in lines[1:3])
    assert len(lines) >= 3 + len(REPORTS[name].runs)


def test_what_fails_is_told_and_void_is_marked() -> None:
    assert "20 × 503" in to_text(REPORTS["failing"])
    assert "void" in to_text(REPORTS["void"]).splitlines()[3]
    assert "failed" not in to_text(REPORTS["one"])


@pytest.mark.parametrize("name", ["several", "unanswered"])
@pytest.mark.parametrize("suffix", FORMS)
def test_every_form_is_written(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"load{suffix}"
    if name == "unanswered" and suffix in (".png", ".svg", ".pdf"):
        with pytest.raises(InvalidSettings, match="nothing to draw"):
            save(REPORTS[name], path)
        return
    assert save(REPORTS[name], path) == path
    assert path.stat().st_size > 0


def test_an_unknown_form_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"\.docx"):
        save(REPORTS["one"], tmp_path / "load.docx")


def test_json_and_csv_hold_every_answer(tmp_path: Path) -> None:
    document = json.loads(save(REPORTS["several"], tmp_path / "load.json").read_text())
    assert [each["requests"] for each in document["runs"]] == [100, 200, 400]
    rows = list(csv.DictReader(save(REPORTS["several"], tmp_path / "load.csv").read_text().splitlines()))
    assert sum(int(row["requests"]) for row in rows) == 700
    assert {row["load"] for row in rows} == {"100/s", "200/s", "400/s"}


def test_the_page_opens_offline_and_escapes_what_a_server_says() -> None:
    page = to_html(REPORTS["failing"])
    assert "<script" not in page
    assert "http://www.w3.org" not in page.replace('xmlns="http://www.w3.org', "")
    assert REPORTS["failing"].verdict.split(";")[0] in page
    assert page.count("<svg") == 2


def test_the_curve_ends_at_the_slowest_and_never_falls() -> None:
    run = REPORTS["one"].runs[0]
    shares, seconds = zip(*curve_of(run))
    assert list(shares) == sorted(shares) and list(seconds) == sorted(seconds)
    assert shares[0] == 1 and shares[-1] == 2 * 200
    assert seconds[-1] == run.latency["max"]


def test_the_picture_names_every_run(tmp_path: Path) -> None:
    root = ET.fromstring(save(REPORTS["several"], tmp_path / "load.svg").read_bytes())
    texts = " ".join(text for element in root.iter() if (text := element.text))
    for name in ("100/s", "200/s", "400/s", "target 50 ms", "99 %"):
        assert name in texts
    assert draw(REPORTS["one"], width="narrow", theme="dark").axes
