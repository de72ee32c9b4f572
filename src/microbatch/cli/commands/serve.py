"""``microbatch serve``: a function or a model behind HTTP, in batches that form by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from microbatch.cli.options import BYTES, DURATION, as_json_option
from microbatch.cli.output import answer, print_json
from microbatch.cli.serve_language_models import (
    check_used,
    language_model_options,
    loader,
    only_language_models,
    taken_from,
)
from microbatch.cli.serve_options import FILE, application_options, engine_options, settings_of
from microbatch.errors import InvalidSettings
from microbatch.serving.loading.folder_kind import EMBEDDINGS, LANGUAGE_MODEL, MODULE

LOOPBACK = "127.0.0.1"
KINDS = (EMBEDDINGS, MODULE, LANGUAGE_MODEL)


def parse_rates(text: str) -> tuple[float, ...]:
    """``"50,100,200"`` → (50, 100, 200).

    Raises:
        BadParameter: not numbers above zero with commas between them.
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise click.BadParameter(f"{text!r} is not a list of requests per second, as in 50,100,200.")
    return rates


@click.command(short_help="Serve a function or a model over HTTP.")
@click.argument("models", nargs=-1, metavar="MODEL...")
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen at; others reach it only if told.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any that is free.")
@click.option("--as", "as_kind", type=click.Choice(KINDS), help="What a folder is served as; seen from its files.")
@engine_options
@language_model_options
@click.option("--api-key-file", type=FILE, metavar="FILE", help="Keys that clients must have: KEY or NAME KEY a line.")
@click.option("--body-limit", type=BYTES, metavar="BYTES", help="Largest body of a request.  [default: 16MiB]")
@click.option("--deadline", type=DURATION, metavar="DURATION", help="For requests that name none, as in 2s.")
@click.option(
    "--drain-timeout",
    type=DURATION,
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="For those who wait when it is told to stop.",
)
@click.option("--certificate", type=FILE, metavar="FILE", help="For TLS, in PEM form.")
@click.option("--private-key", type=FILE, metavar="FILE", help="Of the certificate.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads for torch.")
@click.option("--dry-run", is_flag=True, help="Simulate instead of serving: maximum rate, latencies, other limits.")
@click.option("--rates", type=parse_rates, metavar="R[,R...]", help="With --dry-run: requests per second.")
@click.option("--traffic", metavar="KIND", help="With --dry-run: poisson, uniform, bursts, or a CSV file of seconds.")
@as_json_option
def command(
    *,
    models: tuple[str, ...],
    host: str,
    port: int,
    as_kind: str | None,
    api_key_file: Path | None,
    body_limit: int | None,
    deadline: float | None,
    drain_timeout: float,
    certificate: Path | None,
    private_key: Path | None,
    threads: int | None,
    dry_run: bool,
    rates: tuple[float, ...] | None,
    traffic: str | None,
    as_json: bool,
    **engine: Any,
) -> int:
    """Serve MODEL over HTTP. Requests come one by one; batches form by themselves, from the measured latency.

    MODEL is a function from a list of items to a list of results, one decorated with microbatch.batched, or an
    nn.Module, as module:name or file.py:name; or what `microbatch profile` takes: a built-in, a Hugging Face folder
    (sentence embeddings: text in, vector out, also at /v1/embeddings; a language model: completions and chats at /v1,
    as OpenAI's clients ask for them), a .pt2 archive, torchvision:NAME or timm:NAME.
    Several are served at once as name=MODEL.

    \b
    Example:
      microbatch serve app.py:embed --port 8000
      microbatch serve minilm/ --latency-target 50ms
      microbatch serve smollm2/ --tpot-target 50ms
      microbatch serve small=mlp:depth=2,width=64 large=mlp:depth=8,width=1024 --port 0
      microbatch serve mlp:depth=8,width=1024 --dry-run --rates 50,100,200
    """  # fmt: skip
    language = taken_from(engine)
    given = settings_of(**engine)
    _check(models, given, dry_run=dry_run, simulated={"--rates": rates, "--traffic": traffic})
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if dry_run:
        from microbatch.cli.serve_dry_run import expected

        check_used(language, ())
        answer(expected(models, given, rates or (), traffic or "poisson", as_kind), (), as_json=as_json)
        return 0
    server: dict[str, Any] = {"host": host, "port": port, "drain_timeout": drain_timeout}
    server |= {"certificate": certificate, "private_key": private_key}
    application = application_options(api_key_file, body_limit, deadline)
    _serve(models, given, language, as_kind, application, server, as_json=as_json)
    return 0


def _check(models: Sequence[str], given: Mapping[str, Any], *, dry_run: bool, simulated: Mapping[str, object]) -> None:
    """All contradictions among the options, in one error.

    Raises:
        InvalidSettings: there are some.
    """
    wrong = [f"{name} is for --dry-run." for name, value in simulated.items() if value is not None and not dry_run]
    if not models and not dry_run:
        wrong.append("There is nothing to serve.")
    if len(models) > 1:
        shared = [name for name in ("profile", "examples") if name in given]
        wrong += [f"--{name} belongs to one model; {len(models)} are served." for name in shared]
    if given.get("stateful") and "examples" in given:
        wrong.append("--stateful runs no item twice, so --examples says nothing.")
    if wrong:
        raise InvalidSettings(" ".join(wrong), "See microbatch serve --help.")


def _serve(
    models: Sequence[str],
    given: Mapping[str, Any],
    language: Mapping[str, Any],
    as_kind: str | None,
    application_options: Mapping[str, Any],
    server_options: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """In the foreground, until it is told to stop."""
    from microbatch.cli.serve_notes import collected_warnings
    from microbatch.cli.serve_text import start_document, start_lines
    from microbatch.serving.loading.load import load_all
    from microbatch.web.application import application
    from microbatch.web.server import serve
    from microbatch.web.tracing import traced_if_wanted

    with collected_warnings() as warnings:
        more = {LANGUAGE_MODEL: loader(language, alone=only_language_models(models, as_kind))}
        served = load_all(models, given, as_kind=as_kind, more=more)
        check_used(language, served)
        app = traced_if_wanted(application({each.name: each.engine for each in served}, **application_options))

        def started(url: str) -> None:
            notes = list(dict.fromkeys([*(note for each in served for note in each.notes), *warnings.end()]))
            if as_json:
                keys = len(application_options["keys"])
                print_json(start_document(url, served, notes, keys=keys), one_line=True)
            else:
                print("\n".join(start_lines(url, served, notes)), flush=True)

        serve(app, **server_options, started=started)
