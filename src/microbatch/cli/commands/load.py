"""``microbatch load``: what a server does under load, in open and in closed loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from microbatch.cli.app import ANSWER_IS_NO, DONE, INTERRUPTED
from microbatch.cli.options import DURATION, as_json_option, out_option
from microbatch.cli.output import answer, check_outputs
from microbatch.cli.progress import progress_bar
from microbatch.cli.quick import without_collecting
from microbatch.errors import InvalidSettings

if TYPE_CHECKING:
    from microbatch.web.load.requests import Question
    from microbatch.web.load.settings import Load

_DURATION, _WARMUP, _CLIENTS = 10.0, 1.0, 8
"""Where none is asked for."""


def _rates(text: str) -> tuple[float, ...]:
    """``"50,100"`` → (50.0, 100.0): requests a second."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise click.BadParameter(f"{text!r} is not a rate above zero, as in 250, or several, as in 50,100,200.")
    return rates


def _clients(text: str) -> tuple[int, ...]:
    """``"1,8,32"`` → (1, 8, 32)."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 10_000 for part in parts):
        raise click.BadParameter(f"{text!r} is not a number of clients from 1 to 10000, or several, as in 1,8,32.")
    return tuple(int(part) for part in parts)


def _or_zero(text: str) -> float:
    """A duration; ``0`` for none."""
    return 0.0 if text.strip() in ("0", "0s", "0ms") else DURATION(text)


@click.command(short_help="What a server does under load.")
@click.argument("url")
@click.option(
    "--rate", "rates", type=_rates, metavar="N[,N...]", help="Open loop: requests a second; several: a table."
)
@click.option("--clients", type=_clients, metavar="N[,N...]",
              help="Closed loop: clients that ask again as soon as they are answered.  [default: 8]")  # fmt: skip
@click.option("--traffic", default="poisson", show_default=True, metavar="poisson|uniform|bursts|FILE",
              help="How an open loop's requests come; a FILE holds seconds, one a line.")  # fmt: skip
@click.option("--ramp", is_flag=True, help="Double the rate until the server no longer keeps up.")
@click.option("--duration", type=DURATION, metavar="DURATION", help="Of each run.  [default: 10s]")
@click.option("--requests", type=click.IntRange(min=1), metavar="N", help="End each run after so many.")
@click.option("--warmup", type=_or_zero, metavar="DURATION",
              help="Before each run, not counted; 0 for none.  [default: 1s, of a FILE 0]")  # fmt: skip
@click.option("--target", type=DURATION, metavar="DURATION", help="Goodput counts answers within this, as in 50ms.")
@click.option("--timeout", type=DURATION, default="30s", show_default=True, metavar="DURATION",
              help="From the moment a request is due; later it has failed.")  # fmt: skip
@click.option("--connections", type=click.IntRange(1, 20_000), default=1000, show_default=True, metavar="N",
              help="Most that an open loop has at once.")  # fmt: skip
@click.option("--body", metavar="TEXT", help="The body of each request, as in '[0.1, 0.2]'.")
@click.option("--body-file", type=click.Path(path_type=Path), metavar="FILE",
              help="The same from a file; its suffix tells the type (.json .npy .safetensors .msgpack).")  # fmt: skip
@click.option("--items-file", type=click.Path(path_type=Path), metavar="FILE",
              help="Items in turn, one JSON value on each line.")  # fmt: skip
@click.option("--method", type=click.Choice(("POST", "GET")), default="POST", show_default=True, help="Of HTTP.")
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="A further header; may be repeated.")
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="A file with the server's key.")
@click.option("--deadline", type=DURATION, metavar="DURATION", help="Sent with each request: answer by then or not.")
@click.option("--allow-remote", is_flag=True, help="The server may be another machine.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of random traffic.")
@out_option
@as_json_option
def command(*, url: str, outputs: tuple[Path, ...], as_json: bool, allow_remote: bool, **asked: Any) -> int:
    """Send requests to a server and say how many it answers, and how fast.

    An open loop (--rate) sends requests when they are due, whatever the server does, as independent users would; a
    closed loop (--clients) has so many clients that wait for their answers. Latency counts from the moment a request
    was due. Where URL names no path, and no body is given, both come from what the server publishes (OpenAPI).

    \b
    Example:
      microbatch load http://127.0.0.1:8000 --rate 250 --duration 10s
      microbatch load 127.0.0.1:8000 --clients 1,8,32 --target 50ms --out load.svg
      microbatch load 127.0.0.1:8000/predict --rate 50 --ramp --body '[0.1, 0.2]'
      microbatch load 127.0.0.1:8000/v1/embeddings --rate 50 --traffic bursts --items-file texts.jsonl --json
    """
    check_outputs(outputs)
    load = _load(**asked)
    if not load.clients:
        load.times(load.rates[0] if load.rates else None)  # a wrong file is told before anything is sent
    try:
        from microbatch.web.load.run import generate
    except ModuleNotFoundError as error:
        raise InvalidSettings(f"load needs {error.name}.", "Install it: pip install 'microbatch[serve]'.") from None
    question = _question(url, allow_remote=allow_remote, **asked)
    with progress_bar() as progress, without_collecting():
        report = generate(question, load, progress)
    answer(report, outputs, as_json=as_json)
    if any(run.interrupted for run in report.runs):
        return INTERRUPTED
    return DONE if any(run.throughput for run in report.runs) else ANSWER_IS_NO


def _load(**asked: Any) -> Load:
    """Clients where no rate is asked for; an end where none is."""
    from microbatch.serving.decisions.traffic import TRAFFIC
    from microbatch.web.load.settings import Load

    recorded = asked["traffic"] not in TRAFFIC
    if asked["clients"] and (asked["rates"] or asked["ramp"] or asked["traffic"] != "poisson"):
        raise click.UsageError("--clients is a closed loop; --rate, --ramp and --traffic are of an open one.")
    closed = not (asked["rates"] or recorded)
    endless = asked["requests"] is None and not recorded
    return Load(
        clients=(asked["clients"] or (_CLIENTS,)) if closed else (),
        rates=asked["rates"] or (),
        traffic=asked["traffic"],
        ramp=asked["ramp"],
        duration=_DURATION if asked["duration"] is None and endless else asked["duration"],
        requests=asked["requests"],
        warmup=(0.0 if recorded else _WARMUP) if asked["warmup"] is None else asked["warmup"],
        target=asked["target"],
        timeout=asked["timeout"],
        connections=asked["connections"],
        seed=asked["seed"],
    )


def _question(url: str, *, allow_remote: bool, **asked: Any) -> Question:
    """What is sent, tried once."""
    from microbatch.web.load import preflight
    from microbatch.web.load.requests import DEADLINE, Question, api_key_from, headers_from
    from microbatch.web.load.target import target_of

    target = target_of(url, allow_remote=allow_remote)
    key = api_key_from(asked["api_key_file"]) if asked["api_key_file"] else ""
    headers = headers_from(asked["headers"], key)
    if asked["deadline"] is not None:
        headers[DEADLINE] = f"{asked['deadline']:.6g}"
    bodies, items = _bodies(asked)
    question = Question(target=target, method=asked["method"], headers=headers)
    question = preflight.completed(question, bodies=bodies, items=items)
    preflight.check(question, patience=asked["timeout"])
    return question


def _bodies(asked: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Bodies as they are given, and items that a body is to be made of; at most one of the two."""
    from microbatch.web.load.requests import body_from, body_of_text, items_from

    given = [name for name in ("body", "body_file", "items_file") if asked[name] is not None]
    if len(given) > 1:
        raise click.UsageError(
            f"{' and '.join(f'--{name}'.replace('_', '-') for name in given)} say the same; give one."
        )
    if asked["items_file"] is not None:
        return (), tuple(items_from(asked["items_file"]))
    if asked["body_file"] is not None:
        return (body_from(asked["body_file"]),), ()
    return ((body_of_text(asked["body"]),), ()) if asked["body"] is not None else ((), ())
