"""``microbatch serve``: wrong requests, dry runs, and a real process with real HTTP."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import microbatch
from microbatch.cli.app import run
from microbatch.curves.profile import Point, Profile
from microbatch.errors import InvalidSettings
from microbatch.serving.decisions.dry_run import arrivals_of, dry_run
from microbatch.serving.decisions.latency import Latency
from tests.cli.examples import a_profile

APP = """
import microbatch

def double(items):
    return [2 * item for item in items]

@microbatch.batched(examples=[1.0, 2.0], latency_target=0.5)
def embed(items: list[float]) -> list[float]:
    return [item + 1 for item in items]

def ranks(items):
    return [sorted(items).index(item) for item in items]

def fails(items):
    raise ValueError("not these")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "served_app.py").write_text(APP)
    (tmp_path / "items.json").write_text("[3.0, 1.0, 2.0]")
    (tmp_path / "text.json").write_text('"text"')
    (tmp_path / "broken.json").write_text("[")
    (tmp_path / "keys.txt").write_text("# of this server\nann first-key-of-ann\nsecond-key-alone\n")
    (tmp_path / "no_keys.txt").write_text("# none\n\n")
    (tmp_path / "three.txt").write_text("a b c\n")
    (tmp_path / "short.txt").write_text("short\n")
    microbatch.save(a_profile(), tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "served_app", raising=False)
    return tmp_path


FUNCTION = "served_app:double"

WRONG: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "There is nothing to serve."),
    "an unknown function": (["served_app:dubble"], "Did you mean double"),
    "an unknown model": (["no_such"], "There is no model 'no_such'"),
    "no module": (["no_such_app:embed"], "There is no module"),
    "an unknown policy": ([FUNCTION, "--policy", "fastest"], "There is no policy 'fastest'"),
    "a duration without a unit": ([FUNCTION, "--latency-target", "50"], "--latency-target"),
    "a size of none": ([FUNCTION, "--max-batch-size", "0"], "--max-batch-size"),
    "an unknown kind": ([FUNCTION, "--as", "server"], "--as"),
    "a kind for a function": ([FUNCTION, "--as", "module"], "is none"),
    "a delay above the target": (
        [FUNCTION, "--latency-target", "5ms", "--max-queue-delay", "10ms"],
        "A queue delay of 10 ms leaves nothing of a target of 5 ms.",
    ),
    "a delay that nobody waits": (
        [FUNCTION, "--policy", "launch_when_free", "--max-queue-delay", "5ms"],
        "launch_when_free never waits",
    ),
    "a window without a delay": ([FUNCTION, "--policy", "fixed_window"], "fixed_window needs max_queue_delay"),
    "a device for a function": ([FUNCTION, "--device", "cuda"], "devices= places a module"),
    "rates without a dry run": ([FUNCTION, "--rates", "50", "--traffic", "poisson"], "--rates is for --dry-run."),
    "a rate of zero": ([FUNCTION, "--dry-run", "--rates", "50,0"], "50,0"),
    "rates in words": ([FUNCTION, "--dry-run", "--rates", "many"], "'many' is not a list of requests per second"),
    "two of one name": (["served_app:double", "served_app.py:double"], "Two models are called 'double'"),
    "one profile for two": (["a=served_app:double", "b=served_app:embed", "--profile", "profile.json"], "one model; 2"),
    "a missing profile": ([FUNCTION, "--profile", "none.json"], "none.json"),
    "a profile that is none": ([FUNCTION, "--profile", "text.json"], "text.json"),
    "examples that are no list": ([FUNCTION, "--examples", "text.json"], "holds no list of items"),
    "examples that are no JSON": ([FUNCTION, "--examples", "broken.json"], "broken.json is no JSON"),
    "examples of what has state": ([FUNCTION, "--examples", "items.json", "--stateful"], "--examples says nothing"),
    "examples that fail": (["served_app:fails", "--examples", "items.json"], "ValueError on a batch of 1"),
    "answers that differ": (["served_app:ranks", "--examples", "items.json"], "another answer in a batch"),
    "no keys": ([FUNCTION, "--api-key-file", "no_keys.txt"], "There is no key in no_keys.txt"),
    "no key file": ([FUNCTION, "--api-key-file", "none.txt"], "none.txt"),
    "a line that is no key": ([FUNCTION, "--api-key-file", "three.txt"], "Line 1 of three.txt"),
    "a key that is too short": ([FUNCTION, "--api-key-file", "short.txt"], "A key of 5 characters"),
    "a certificate alone": ([FUNCTION, "--certificate", "keys.txt"], "TLS needs a certificate and its private key"),
    "a host that is elsewhere": ([FUNCTION, "--host", "203.0.113.7"], "Nothing can listen at 203.0.113.7"),
    "an unknown traffic": (["--dry-run", "--profile", "profile.json", "--traffic", "floods"], "no traffic 'floods'"),
    "tokens in a dry run": (["--dry-run", "--profile", "profile.json", "--token-budget", "64"], "counts tokens"),
    "two in a dry run": (["mlp", "cnn", "--dry-run"], "of one model, not of 2"),
    "a dry run of nothing": (["--dry-run"], "neither a model nor a profile"),
    "a dry run without a measurement": ([FUNCTION, "--dry-run"], "Nothing is known of the latency"),
    "a target that cannot be kept": (
        ["--dry-run", "--profile", "profile.json", "--latency-target", "5ms"], "above the target of 5 ms",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, words = WRONG[case]
    assert run(["serve", *arguments, "--port", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert words.lower() in " ".join(printed.err.split()).lower()


def test_contradictions_come_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["serve", "a=mlp", "b=cnn", "--profile", "profile.json", "--examples", "items.json", "--rates", "5"]) == 2
    )
    told = capsys.readouterr().err
    assert "--rates is for --dry-run" in told
    assert "--profile belongs to one model" in told
    assert "--examples belongs to one model" in told


def test_a_dry_run_counts_items_which_a_language_model_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    assert run(["serve", str(tmp_path), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "no answer to an item" in told
    assert "--as module" in told


def test_a_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["serve", FUNCTION, "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use" in capsys.readouterr().err


# Dry runs.


def test_a_dry_run_for_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["serve", "any:thing", "--dry-run", "--profile", "profile.json", "--rates", "50,100,9999", "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    expected = dry_run(folder / "profile.json", rates=[50, 100, 9999]).to_json()
    assert document == json.loads(json.dumps(expected))
    assert [row["rate"] for row in document["at"]] == [50, 100, 9999]
    assert set(document["at"][0]) == {"rate", "p50", "p99", "mean_batch"}
    assert 0.01 <= document["at"][0]["p50"] <= document["at"][0]["p99"]
    assert document["at"][2]["p50"] is None
    assert 250 < document["max_rate"] < 9999
    assert {row["max_batch_size"] for row in document["what_if"]} == {1, 2}


@pytest.mark.parametrize("traffic", ["poisson", "uniform", "bursts"])
def test_a_dry_run_to_read(folder: Path, capsys: pytest.CaptureFixture[str], traffic: str) -> None:
    assert run(["serve", "--dry-run", "--profile", "profile.json", "--traffic", traffic]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("At most ")
    assert "Other limits" in printed
    assert "policy marginal_gain" in printed
    assert all(len(line) <= 116 for line in printed.splitlines())


def test_a_trace_keeps_its_shape_at_every_rate(folder: Path) -> None:
    (folder / "trace.csv").write_text("seconds\n10\n11\n13\n")
    arrive, own_rate = arrivals_of(str(folder / "trace.csv"))
    assert own_rate == pytest.approx(2 / 3)
    assert arrive(2 / 3, 7, 0).tolist() == pytest.approx([0, 1, 3, 4.5, 5.5, 7.5, 9])
    assert arrive(4, 6, 0).tolist() == pytest.approx([time / 6 for time in (0, 1, 3, 4.5, 5.5, 7.5)])
    table = Latency({1: 0.01, 2: 0.01})
    assert [row.rate for row in dry_run(table, traffic=str(folder / "trace.csv")).at] == [own_rate]
    (folder / "pairs.csv").write_text("".join(f"{second}\n{second}\n" for second in range(50)))
    faster = dry_run(table, traffic=str(folder / "pairs.csv"), rates=[20, 40], requests=1000)
    assert [row.mean_batch for row in faster.at] == pytest.approx([2, 2], rel=0.01)
    (folder / "once.csv").write_text("1\n1\n")
    with pytest.raises(InvalidSettings, match="no rate"):
        dry_run(table, traffic=str(folder / "once.csv"))


def test_a_dry_run_measures_what_has_no_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "mlp:depth=2,width=16", "--dry-run", "--max-batch-size", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row[0] for row in document["curve"]] == [1, 2, 4]
    assert document["max_batch_size"] == 4
    assert document["max_rate"] > 0


def test_a_dry_run_with_a_profile_loads_no_torch(folder: Path) -> None:
    code = (
        "import sys; from microbatch.cli.app import run;"
        "status = run(['serve', 'app:embed', '--dry-run', '--profile', 'profile.json', '--rates', '50']);"
        "print(status, [m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "0 []"


# A real process.


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "microbatch", "serve", *arguments, "--port", "0"]
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line_of(child: subprocess.Popen[str]) -> str:
    """The next line on standard output; the error where there is none."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.communicate()[1]
    return line


def post(url: str, document: Any, **headers: str) -> tuple[int, Any]:
    body = json.dumps(document).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_several_models_and_a_line_for_machines(folder: Path, number: signal.Signals) -> None:
    with serving(folder, "a=served_app:double", "b=served_app.py:embed", "--max-queue", "7", "--json") as child:
        document = json.loads(line_of(child))
        url = document["url"]
        assert url.startswith("http://127.0.0.1:")
        assert [(each["name"], each["path"], each["max_queue"], each["exact"]) for each in document["models"]] == [
            ("a", "/predict/a", 7, None), ("b", "/predict/b", 7, True),
        ]  # fmt: skip
        assert post(f"{url}/predict/a", {"item": 4}) == (200, {"result": 8})
        assert post(f"{url}/predict/b", {"items": [1, 2]})[1]["results"] == [2, 3]
        child.send_signal(number)
        assert child.wait(60) == 0
        assert child.stdout is not None and child.stdout.read() == ""


def test_keys_and_what_the_start_says(folder: Path) -> None:
    with serving(folder, "served_app:embed", "--api-key-file", "keys.txt") as child:
        lines = [line_of(child)]
        while "Ctrl-C" not in lines[-1]:
            lines.append(line_of(child))
        told = "".join(lines)
        assert lines[0].startswith("embed: served_app:embed at http://127.0.0.1:")
        assert "policy marginal_gain; batches of up to " in told
        assert "1024 may wait" in told
        assert "the same answer alone and in a batch of" in told
        assert "/predict -H 'Content-Type: application/json' -d '{\"item\": 1.0}'" in told
        assert len(lines) <= 9
        url = lines[0].split(" at ")[1].strip()
        assert post(url, {"item": 4.5})[0] == 401
        assert post(url, {"item": 4.5}, Authorization="Bearer first-key-of-ann") == (200, {"result": 5.5})
        assert post(url, {"item": 4.5}, **{"X-API-Key": "second-key-alone"}) == (200, {"result": 5.5})


def test_it_says_who_can_reach_it_and_that_batching_cannot_help(folder: Path) -> None:
    points = tuple(Point(batch_size=size, samples=(0.01 * size,) * 3) for size in (1, 2, 4))
    microbatch.save(Profile(points=points, model="mlp", dtype="fp32"), folder / "steep.json")
    with serving(folder, "served_app:double", "--host", "0.0.0.0", "--profile", "steep.json", "--json") as child:
        document = json.loads(line_of(child))
    assert any("Batching cannot help this model here" in note for note in document["notes"])
    assert any("0.0.0.0" in note and "no key" in note for note in document["notes"])
    assert document["models"][0]["max_batch_size"] == 1
    assert document["models"][0]["reason"] == "a larger one would not be faster"


# Language models.


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one with random weights."""
    from tests.llm.engines import TEXT, model_of, tokenizer_folder

    path = tmp_path_factory.mktemp("language") / "tiny"
    model_of(TEXT).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tokenizer_folder() / name).read_bytes())
    return path


def test_a_language_model_is_served_from_its_folder(language_model: Path) -> None:
    arguments = [str(language_model), "--tpot-target", "1s", "--max-num-tokens", "64", "--dtype", "fp32", "--json"]
    with serving(language_model.parent, *arguments) as child:
        start = json.loads(line_of(child))
        (model,) = start["models"]
        assert (model["kind"], model["path"], model["max_num_tokens"]) == ("language-model", "/v1", 64)
        asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        status, answer = post(f"{start['url']}/v1/completions", asked)
        assert (status, answer["usage"]["total_tokens"]) == (200, 6)


LANGUAGE: dict[str, tuple[list[str], str]] = {
    "a policy": (["--policy", "marginal_gain"], "--policy: not for a language model"),
    "two devices": (["--device", "cpu", "--device", "cuda"], "one device, not 2"),
}


@pytest.mark.parametrize("case", LANGUAGE)
def test_options_that_a_language_model_has_not(
    language_model: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, words = LANGUAGE[case]
    assert run(["serve", str(language_model), *arguments, "--port", "0"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_options_of_language_models_need_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", FUNCTION, "--tpot-target", "50ms", "--dtype", "bf16", "--port", "0"]) == 2
    assert "--tpot-target, --dtype: for language models" in " ".join(capsys.readouterr().err.split())


def test_options_of_language_models_say_nothing_in_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "mlp", "--dry-run", "--max-num-tokens", "64"]) == 2
    assert "--max-num-tokens: for language models" in " ".join(capsys.readouterr().err.split())


def test_two_language_models_have_no_items_either(language_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [f"a={language_model}", f"b={language_model}"]
    assert run(["serve", *models, "--max-batch-size", "8", "--port", "0"]) == 2
    assert "--max-batch-size: not for a language model" in " ".join(capsys.readouterr().err.split())
