"""Load and our own server together: bodies from what it publishes, and both count the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from microbatch.cli.app import run
from microbatch.serving.engine.batcher import DynamicBatcher
from tests.web.running import running

SHORT = ["--warmup", "0", "--requests", "40", "--json"]


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def sums(rows: list[list[float]]) -> list[float]:
    return [sum(row) for row in rows]


ENGINES = {
    "texts": lambda: DynamicBatcher(lengths),
    "rows": lambda: DynamicBatcher(sums),
    "numbers": lambda: DynamicBatcher(sums, examples=[[1.0, 2.0]]),
    "module": lambda: DynamicBatcher(torch.nn.Linear(4, 2), examples=[torch.randn(4)]),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("asked", [["--clients", "3"], ["--rate", "300"]], ids=["closed", "open"])
def test_a_body_is_made_from_what_the_server_publishes(
    name: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ENGINES[name]()
    with running(engine) as url:
        assert run(["load", url, *asked, *SHORT]) == 0
        metrics = engine.metrics()
    document = json.loads(capsys.readouterr().out)
    assert (document["requests"], document["errors"]) == (40, {})
    assert metrics.answered == 41  # one to try
    assert metrics.failed == metrics.cancelled == metrics.refused == 0


def test_several_engines_have_paths_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with running({"one": DynamicBatcher(lengths), "two": DynamicBatcher(sums)}) as url:
        assert run(["load", f"{url}/predict/two", *SHORT]) == 0
        assert json.loads(capsys.readouterr().out)["errors"] == {}


def test_a_server_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("open sesame".replace(" ", "-"))
    with running(DynamicBatcher(lengths), keys=["open-sesame"]) as url:
        assert run(["load", f"{url}/predict", "--body", '"x"', *SHORT]) == 2
        assert "--api-key-file" in json.loads(capsys.readouterr().out)["error"]["remedy"]
        assert run(["load", url, *SHORT, "--api-key-file", str(tmp_path / "key")]) == 0


def test_a_deadline_that_cannot_be_met_is_counted_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    engine = DynamicBatcher(lengths, max_queue=1)
    with running(engine) as url:
        status = run(["load", f"{url}/predict", "--body", '"x"', "--deadline", "1us", "--clients", "4", *SHORT])
    document = json.loads(capsys.readouterr().out)
    failed = sum(document["errors"].values())
    assert set(document["errors"]) <= {"504", "429"}
    assert failed > 0 and document["requests"] == 40
    assert status == (1 if failed == 40 else 0)


def test_items_of_mixed_length_and_bad_ones_among_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "items.jsonl").write_text('"a"\n"bb"\n3\n"dddd"\n')
    with running(DynamicBatcher(lengths)) as url:
        assert run(["load", url, *SHORT, "--clients", "1", "--items-file", str(tmp_path / "items.jsonl")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["errors"] == {"400": 10}
    assert "str" in document["samples"]["400"]
