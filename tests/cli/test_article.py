"""``microbatch article``: one verdict per plot, and the report's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from microbatch.cli.app import run
from microbatch.profiling.article import Article, Section
from microbatch.profiling.article_claims import Verdict
from microbatch.profiling.article_curve import Curve
from tests.cli.examples import an_explanation


def an_article() -> Article:
    explanation = an_explanation()
    curve = Curve(label="mlp", model="mlp", profile=explanation.profile, explanation=explanation)
    verdict = Verdict(holds=True, detail="Time stays within 10 % up to batch 4.", figures={"flat_to": 4})
    section = Section(
        key="mlp",
        title="An MLP",
        claim="Small batches cost the same.",
        quantity="seconds",
        verdict=verdict,
        curves=(curve,),
    )
    return Article(sections=(section,), budget=5.0, wall_seconds=6.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    def fake(**options: Any) -> Article:
        seen.append(options)
        return an_article()

    monkeypatch.setattr("microbatch.profiling.article.run_article", fake)
    return seen


def test_each_plot_gets_its_sentence(calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["article", "--budget", "5s", "--seed", "3"]) == 0
    assert calls == [{"budget": 5.0, "progress": None, "device": "cpu", "device_spec": None, "seed": 3}]
    printed = capsys.readouterr().out
    assert "An MLP" in printed
    assert "Small batches cost the same." in printed
    assert "Time stays within 10 % up to batch 4." in printed


def test_for_machines(calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["article", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sections"][0]["holds"] is True


def test_a_folder_is_filled(calls: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "article"
    assert run(["article", "--out", str(folder)]) == 0
    assert json.loads((folder / "article.json").read_text())["sections"][0]["curves"][0]["profile"]["points"]
    printed = capsys.readouterr().out
    assert all(f"Wrote {path}" in printed for path in folder.iterdir())


@pytest.mark.parametrize("place", ["missing/article", "a_file"])
def test_a_bad_place_is_refused_before_anything_runs(place: str, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    assert run(["article", "--out", str(tmp_path / place)]) == 2
    assert calls == []
