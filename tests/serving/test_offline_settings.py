"""`map` beside what people get wrong, room for outputs, the size it takes, compiled models, real out-of-memory."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import microbatch
from microbatch.batch.token_budget import TokenBudget
from microbatch.serving.offline.map_report import MapReport
from microbatch.serving.offline.mapping import imap
from microbatch.serving.offline.mapping import map as map_
from tests.serving.jobs import (
    LONGEST,
    WIDTH,
    branches,
    encoder,
    one_pass,
    padded,
    rows,
    sequences,
)

ITEMS = 45
NEAR: Any = {"rtol": 0.0, "atol": 1e-12}

assert_close = torch.testing.assert_close


class TestOut:
    def test_a_tensor_and_a_file(self, tmp_path: Path) -> None:
        model, x = nn.Linear(WIDTH, 3).double(), rows(20)
        expected = one_pass(model, lambda: model(x))
        out = torch.zeros(20, 3)
        assert map_(model, x, 6, out=out) is out
        assert_close(out, expected.float())
        file = np.memmap(tmp_path / "out", np.float64, mode="w+", shape=(20, 3))
        assert map_(model, iter(x), 6, out=file) is file
        file.flush()
        assert_close(torch.from_numpy(np.fromfile(tmp_path / "out").reshape(20, 3)), expected, **NEAR)

    def test_room_of_the_same_form(self) -> None:
        batch = padded(sequences(ITEMS), width=LONGEST)
        model = encoder()
        out = {
            "tokens": np.full((ITEMS, LONGEST, WIDTH), 7.0),
            "pooled": torch.empty(ITEMS, WIDTH, dtype=torch.float64),
        }
        keep = lambda m, b: {name: m(**b)[name] for name in ("tokens", "pooled")}  # noqa: E731
        assert map_(model, batch, TokenBudget(64), forward=keep, out=out) is out
        expected = map_(model, batch, TokenBudget(64), forward=keep)
        assert_close(torch.from_numpy(out["tokens"]), expected["tokens"], **NEAR)

    @pytest.mark.parametrize(
        ("out", "text"),
        [
            (torch.empty(9, 3, dtype=torch.float64), "9 rows, the data has 20"),
            (torch.empty(20, 4, dtype=torch.float64), "shape"),
            (torch.empty(20, 3, dtype=torch.long), "torch.int64"),
            ({"y": torch.empty(20, 3)}, "form of the outputs"),
            ([1], "holds a int"),
            (np.broadcast_to(np.zeros(3), (20, 3)), "cannot be written"),
        ],
    )
    def test_room_that_does_not_fit(self, out: Any, text: str) -> None:
        with pytest.raises(microbatch.InvalidSettings, match=text):
            map_(nn.Linear(WIDTH, 3).double(), rows(20), 6, out=out)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no items": (lambda: map_(branches(), []), microbatch.InvalidBatch, "0 items"),
    "no rows": (lambda: map_(branches(), rows(3)[:0]), microbatch.InvalidBatch, "empty"),
    "an empty generator": (lambda: map_(branches(), iter(())), microbatch.InvalidBatch, "0 items"),
    "members that disagree": (
        lambda: map_(branches(), {"x": rows(3), "y": rows(4)}),
        microbatch.InvalidBatch,
        "different lengths",
    ),
    "a text": (lambda: map_(branches(), "abc"), microbatch.InvalidBatch, "str"),
    "a loader": (lambda: map_(branches(), DataLoader(TensorDataset(rows(3)))), microbatch.InvalidBatch, "dataset"),
    "a number": (lambda: map_(branches(), 3), microbatch.InvalidBatch, "int"),
    "size 0": (lambda: map_(branches(), rows(3), 0), microbatch.InvalidBatchSizes, "batch_size"),
    "size -1": (lambda: imap(branches(), rows(3), -1), microbatch.InvalidBatchSizes, "batch_size"),
    "size True": (lambda: map_(branches(), rows(3), True), microbatch.InvalidBatchSizes, "batch_size"),
    "size fast": (lambda: map_(branches(), rows(3), "fast"), microbatch.InvalidBatchSizes, "auto"),
    "no lengths": (lambda: map_(branches(), rows(3), TokenBudget(9)), microbatch.InvalidBatch, "length="),
    "no model": (lambda: map_(3, rows(3)), microbatch.InvalidModel, "int"),  # type: ignore[arg-type]
    "a collate for rows": (lambda: map_(branches(), rows(3), collate=list), microbatch.InvalidBatch, "collate="),
    "a mean over the batch": (lambda: map_(lambda x: x.mean(), rows(3)), microbatch.InvalidModel, "no row for each"),
    "an object": (lambda: map_(lambda x: nn.Linear(1, 1), rows(3)), microbatch.InvalidModel, "Linear"),
    "a profile and a size": (
        lambda: map_(branches(), rows(3), 2, profile="no.json"),
        microbatch.InvalidSettings,
        "profile=",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_clear_error(mistake: str) -> None:
    call, kind, text = MISTAKES[mistake]
    with pytest.raises(kind, match=text):
        call()


def test_outputs_of_another_form_in_a_later_piece() -> None:
    def changes(x: Tensor) -> Any:
        return {"a": x} if float(x[0]) < 3 else {"b": x}

    with pytest.raises(microbatch.InvalidModel, match="form"):
        map_(changes, torch.arange(8.0), 2)


def test_rows_that_depend_on_each_other_are_found_on_request() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.line(x)
            return y - y.mean(0)

    assert map_(branches(), rows(12), check=True).mean.shape == (12,)
    with pytest.raises(microbatch.InvalidModel, match="Mixes"):
        map_(Mixes(), rows(12), check=True)


def test_lists_of_one_result_per_item() -> None:
    def detects(x: Tensor) -> list[dict[str, Any]]:
        return [{"boxes": row[: int(row[0])], "name": f"{int(row[0])}"} for row in x]

    x = torch.arange(1.0, 6.0)[:, None].expand(5, 6)
    found = map_(detects, x, 2)
    assert [len(one["boxes"]) for one in found] == [1, 2, 3, 4, 5]
    assert [one["name"] for one in found] == list("12345")


class TestSize:
    def test_auto_measures_on_the_data_and_runs_nothing_twice(self) -> None:
        seen: list[int] = []

        def double(x: Tensor) -> Tensor:
            seen.extend(x[:, 0].long().tolist())
            return x * 2

        x = torch.arange(500.0)[:, None]
        found, report = map_(double, x, return_report=True)
        assert_close(found, 2 * x)
        assert sorted(seen) == list(range(500))
        assert report.unit == "items"
        assert report.size in {trial.size for trial in report.trials}
        assert f"{report.size} items a piece: the fastest of" in report.reason
        assert json.loads(json.dumps(report.to_json()))["items"] == 500

    def test_a_profile_says_the_size(self, tmp_path: Path) -> None:
        file = tmp_path / "curve.csv"
        file.write_text("batch_size,seconds\n1,1\n4,1.5\n8,2\n16,4.1\n32,8\n")
        _, report = map_(branches(), rows(40), profile=str(file), return_report=True)
        assert (report.size, report.pieces, report.unit) == (8, 5, "items")
        assert "profile" in report.reason

    def test_the_reason_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "microbatch"):
            map_(branches(), rows(40), 9)
        assert "40 items in 5 pieces; 9 items a piece: your size" in caplog.text

    def test_a_limit_of_memory_holds_for_every_piece(self) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, 4096), nn.ReLU(), nn.Linear(4096, 2)).double()
        weights = sum(parameter.nbytes for parameter in model.parameters())
        seen: list[int] = []
        room = weights + 40 * 2 * 4096 * 8

        def run(model: nn.Module, batch: Tensor) -> Any:
            seen.append(len(batch))
            return model(batch)

        x = rows(2000)
        _, report = map_(model, x, memory_limit=room, forward=run, return_report=True)
        assert max(seen[2:]) <= 40  # the first two are predictions, on fake tensors
        assert report.size is not None
        assert report.size <= 40


class Counter:
    """A backend of torch.compile that counts graphs."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, graph: Any, example: list[Any]) -> Any:
        self.shapes.append(tuple(next(x for x in example if isinstance(x, Tensor) and x.dim() == 2).shape))
        return graph.forward


@pytest.mark.parametrize("size", [16, "auto"])
def test_a_compiled_model_is_compiled_once(size: Any) -> None:
    torch._dynamo.reset()
    backend, plain, x = Counter(), nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh()).double(), rows(1030)
    model = torch.compile(plain, backend=backend)
    found = map_(model, x, size)
    assert_close(found, one_pass(plain, lambda: plain(x)), **NEAR)
    assert len(backend.shapes) <= 1  # none where the data ended while auto was looking
    assert size == "auto" or len(backend.shapes) == 1
    torch._dynamo.reset()


def test_autocast_and_other_devices_of_the_outputs() -> None:
    model = nn.Linear(WIDTH, 3)
    assert map_(model, rows(9).float(), 4, autocast=torch.bfloat16).dtype == torch.bfloat16
    assert map_(model, rows(9).float(), 4, output_device=None, device="cpu").device.type == "cpu"
    assert map_(model, rows(9).float(), 4, output_device="meta").device.type == "meta"


def test_progress_is_told_and_silent_in_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[float, str]] = []
    map_(branches(), rows(40), 9, progress=lambda share, text: told.append((share, text)))
    assert told[-1] == (1.0, "40 items")
    map_(branches(), rows(40), 9)
    assert capfd.readouterr() == ("", "")


def test_imap_reads_no_further_than_it_must() -> None:
    taken = []

    def items() -> Iterator[Tensor]:
        for row in rows(100):
            taken.append(row)
            yield row

    stream = imap(branches(), items(), 5)
    next(stream)
    assert len(taken) == 5


def test_the_report_is_public_and_frozen() -> None:
    assert dataclasses.is_dataclass(MapReport)
    with pytest.raises(dataclasses.FrozenInstanceError):
        map_(branches(), rows(4), 2, return_report=True)[1].items = 3


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux only")
@pytest.mark.parametrize("kind", ["conv", "attention"])
@pytest.mark.parametrize("size", ["auto", "256"])
def test_real_out_of_memory(kind: str, size: str, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.capped", kind, size],
        cwd=root,
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["out_of_memory"] >= 1 or size == "auto"  # which may stay below on a busy machine
    assert report["difference"] <= 1e-5
