"""The comparison with other servers: what is measured, what is kept of it, and the page that is made from it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from benchmarks.peer_servers.loads import CLOSED, LOADS, OPEN
from benchmarks.peer_servers.plan import Visit, best_settings, capacity, visits
from benchmarks.peer_servers.summary import cell_of, summary
from benchmarks.peer_servers.table import BATCHES, MODELS, OURS, PEERS, WINDOWS, Setting, command_of
from benchmarks.serving_prediction import judged
from scripts.compare_serving import PAGE, RESULTS, page

ALL = (*OURS, *PEERS)
Row = dict[str, Any]
TUNED = [peer for peer in PEERS if len(peer.settings) > 1]


def rate_of(visit: Visit, clients: int) -> float:
    """A world in which windows cost a lone client and help many, and in which ours is the fastest."""
    window = visit.setting.window or 0.0
    gain = 1.0 + 40 * window if clients == 32 else 1.0 / (1.0 + 100 * window)
    return (100.0 + 3 * (visit.setting.batch or 0)) * gain * (3.0 if visit.peer.ours else 1.0)


def rows_of(visit: Visit, rows: list[Row]) -> list[Row]:
    made = []
    for load in visit.loads:
        about = dict(zip(("phase", "round", "model", "peer", "setting", "load"), visit.key(load.name)))
        figures: Row = {
            "p50": 0.01,
            "p99": 0.02,
            "failed": 0,
            "client_cpu": 0.5,
            "void": "",
            "stolen": 0.01,
            "load_average": 1.0,
        }
        if load.clients:
            figures["rate"] = rate_of(visit, load.clients)
        else:
            figures |= {"asked": load.share * capacity(visit.phase, visit.model, rows, ALL), "behind": False}
            figures |= {"rate": figures["asked"], "p50": 0.01 + (visit.setting.window or 0.0)}
        made.append(about | figures)
    if visit.phase == "round":
        about = dict(zip(("phase", "round", "model", "peer", "setting", "load"), visit.key("idle")))
        made.append(about | {"share": 0.001, "started": 1.0})
    return made


def run(rows: list[Row], most: int | None = None) -> list[Row]:
    for number, visit in enumerate(visits(MODELS, ALL, rows, 3)):
        if number == most:
            break
        rows += rows_of(visit, rows)
    return rows


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    return run([])


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("phase", "round", "model", "peer", "setting", "load"))


def test_every_setting_of_every_peer_is_tried_under_every_load_once(measured: list[Row]) -> None:
    tried = Counter(key(row)[2:] for row in measured if row["phase"] == "tuning")
    wanted = {(model, peer.name, setting.label, load) for model in MODELS for peer in TUNED if model in peer.models
              for setting in peer.settings for load in LOADS}  # fmt: skip
    assert set(tried) == wanted and set(tried.values()) == {1}


def test_settings_of_the_tables() -> None:
    grid = {Setting(batch, window) for batch in BATCHES for window in WINDOWS}
    by_name = {peer.name: peer for peer in PEERS}
    for name in ("litserve", "mosec", "ray", "batched"):
        assert set(by_name[name].settings) == grid and len(by_name[name].settings) == len(grid)
    assert {peer.name for peer in PEERS} == {"litserve", "mosec", "bentoml", "ray", "batched", "infinity", "fastapi"}
    assert command_of(by_name["mosec"], "mlp", Setting(8, 0.005), 7, "python")[-1] == "5"


def test_every_round_has_every_server_at_the_settings_that_won(measured: list[Row]) -> None:
    for number in (1, 2, 3):
        row = {(row["peer"], row["load"]): row["setting"] for row in measured
               if row["phase"] == "round" and row["round"] == number and row["model"] == "mlp"}  # fmt: skip
        assert row["mosec", "1 client"] == "0 ms × 32" and row["mosec", "32 clients"] == "10 ms × 32"
        assert {peer for peer, _ in row} == {peer.name for peer in ALL if "mlp" in peer.models}
    order = [
        row["peer"] for row in measured if row["phase"] == "round" and row["load"] == "idle" and row["model"] == "mlp"
    ]
    assert order[:8] != order[8:16], "each round has an order of its own"


def test_the_setting_with_the_least_p50_and_the_one_with_the_least_p99_both_stay() -> None:
    peer = next(peer for peer in PEERS if peer.name == "mosec")
    quick, steady = Setting(8, 0.0), Setting(32, 0.01)
    rows = [
        {"phase": "tuning", "round": 0, "model": "mlp", "peer": "mosec", "setting": setting.label, "load": OPEN[0].name,
         "rate": 1.0, "p50": p50, "p99": p99, "behind": behind}
        for setting, p50, p99, behind in ((quick, 0.01, 0.09, False), (steady, 0.02, 0.03, False),
                                          (Setting(32, 0.0), 0.001, 0.001, True))
    ]  # fmt: skip
    assert set(best_settings("mlp", peer, rows)) == {quick, steady}


def test_a_run_that_was_killed_goes_on_where_it_stopped(measured: list[Row]) -> None:
    rows = run([], most=40)
    rows = rows[:-2]  # in the middle of a server's turn
    again = run([*rows])
    assert Counter(map(key, again)) == Counter(map(key, measured))


def test_a_server_that_did_not_start_is_not_tried_again() -> None:
    rows: list[Row] = []
    first = next(visits(MODELS, ALL, rows, 1))
    rows.append(dict(zip(("phase", "round", "model", "peer", "setting", "load"), first.key("start"))) | {"why": "x"})
    then = next(visits(MODELS, ALL, rows, 1))
    assert (then.peer, then.setting) != (first.peer, first.setting)


def test_all_settings_are_tuned_at_the_same_rates(measured: list[Row]) -> None:
    for model in MODELS:
        for load in OPEN:
            asked = {row["asked"] for row in measured
                     if row["phase"] == "tuning" and row["model"] == model and row["load"] == load.name}  # fmt: skip
            assert len(asked) == 1 and asked.pop() == pytest.approx(load.share * 196 * 1.4)


def test_the_summary_says_what_the_rows_say(measured: list[Row]) -> None:
    found = summary(measured, ALL)
    against = found["tables"]["mlp"]["same callable"]["against"]
    best = 196 * 1.4
    assert against["32 clients"]["best"] in {"mosec", "litserve", "ray", "batched"}
    assert against["32 clients"]["ratio"] == pytest.approx(300 / best) and against["32 clients"]["kept"]
    assert against["8 clients"]["ratio"] == pytest.approx(300 / 196) and len(against["8 clients"]["ratios"]) == 3
    assert against["90 % of capacity, p99"]["ratio"] == 1.0 and against["90 % of capacity, p99"]["kept"]
    assert found["rounds"] == 3 and found["idle"]["mosec"]["most"] == 0.001
    assert found["lengths"]["ratio"] == 1.0 and not found["lengths"]["kept"]


def test_void_rows_do_not_count_and_a_bar_can_be_missed(measured: list[Row]) -> None:
    rows = json.loads(json.dumps(measured))
    for row in rows:
        if (
            row["phase"] == "round"
            and row["peer"] == "microbatch"
            and row["load"] == "8 clients"
            and row["model"] == "mlp"
        ):
            row["rate"] = 1e9 if row["round"] == 1 else 10.0
            row["void"] = "the client's core was busy" if row["round"] == 1 else ""
    against = summary(rows, ALL)["tables"]["mlp"]["same callable"]["against"]["8 clients"]
    assert against["ratio"] == pytest.approx(10 / 196) and not against["kept"]


def test_a_server_that_falls_behind_has_no_latency() -> None:
    about = {"phase": "round", "model": "mlp", "peer": "a", "setting": "s", "load": OPEN[1].name}
    figures = {"rate": 5.0, "p50": 0.1, "p99": 4.0, "failed": 3, "client_cpu": 0.2, "void": ""}
    rows = [about | figures | {"round": number, "behind": number != 1} for number in (1, 2, 3)]
    cell = cell_of(rows, "mlp", "a", OPEN[1].name)
    assert cell is not None and cell["behind"] and cell["p99"] is None


def document(rows: list[Row]) -> Row:
    return summary(rows, ALL) | {
        "versions": {"mosec": {"mosec": "0.9.8"}, "wrk": "wrk 4"}, "seconds": {"round": 3.0, "tuning": 1.0},
        "machine": {"platform": "Linux"}, "texts": "docstrings", "loads": list(LOADS), "rows": rows,
    }  # fmt: skip


def test_a_result_that_changes_changes_the_page(measured: list[Row]) -> None:
    rows = json.loads(json.dumps(measured))
    before = page(document(rows))
    for row in rows:
        if row["phase"] == "round" and row["peer"] == "mosec" and row["load"] == CLOSED[2].name:
            row["rate"] = 777.0
    after = page(document(rows))
    assert "| 777 (10 ms × 32) |" in after and before != after and "mosec 0.9.8" in after


@pytest.mark.skipif(not RESULTS.exists(), reason="not measured yet")
def test_the_page_is_made_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text(encoding="utf-8")))


def test_ours_that_falls_behind_misses_its_bar(measured: list[Row]) -> None:
    rows = json.loads(json.dumps(measured))
    for row in rows:
        if (
            row["phase"] == "round"
            and row["peer"] == "microbatch"
            and row["load"] == OPEN[1].name
            and row["model"] == "mlp"
        ):
            row["behind"] = True
    against = summary(rows, ALL)["tables"]["mlp"]["same callable"]["against"]
    assert against[f"{OPEN[1].name}, p99"]["kept"] is False and against[f"{OPEN[0].name}, p99"]["kept"]
    assert "falls behind" in page(document(rows))


def test_predictions_are_judged_by_the_median_of_valid_rounds() -> None:
    def row(expected: float, measured: float, void: str = "") -> Row:
        return {"what": "p50", "share": 0.5, "expected": expected, "measured": measured, "void": void}

    (found,) = judged([row(1.0, 1.05), row(1.0, 1.08), row(1.0, 9.0, "busy"), row(1.0, 2.0)])
    assert found["off"] == pytest.approx(1 / 1.08 - 1) and found["kept"]
    assert not judged([row(1.0, 1.2)])[0]["kept"] and not judged([row(1.0, 1.0, "busy")])[0]["kept"]
