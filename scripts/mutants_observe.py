"""Breaks of what shows a server: metrics, the live page, traces; see `scripts.mutants_table`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

OBSERVE: tuple[Mutant, ...] = (
    *_rows(
        "serving/decisions/metrics.py",
        "web/test_metrics.py",
        ("bisect_left(LATENCY_BUCKETS, seconds)", "0", "latencies are counted where they belong"),
        ("or len(self.reasons) < MOST_REASONS", "or True", "reasons are bounded"),
    ),
    *_rows(
        "serving/engine/service.py",
        "web/test_metrics.py",
        ("busy_seconds=counters.busy_seconds + under_way", "busy_seconds=under_way", "busy seconds never fall"),
    ),
    *_rows(
        "web/metrics_table.py",
        "web/test_metrics.py",
        ("accumulate(metrics.latency_counts)", "metrics.latency_counts", "buckets are cumulative"),
        ("if size <= bound)", "if size < bound)", "a bound belongs to its bucket"),
        ('field_of("accepted")', 'field_of("answered")', "accepted items are counted"),
    ),
    *_rows(
        "web/metrics.py",
        "web/test_metrics.py",
        ("except (TypeError, ValueError):", "except KeyError:", "any Accept header is answered"),
        ('elif series.name == "ready":', "elif False:", "a model that starts is not ready"),
    ),
    *_rows(
        "web/engine_metrics.py",
        "web/test_metrics.py",
        ('if getattr(engine, "started", True) else None', "", "nobody is started by a look"),
    ),
    *_rows(
        "web/live_view.py",
        "web/test_live_view.py",
        ("if look.at >= last.at - WINDOW)", "if True)", "rates are of the last seconds"),
        ("seconds * max(1, workers)", "seconds", "busy is a share of all workers"),
        ("p99 > target:", "p99 < target:", "a missed target is said"),
        ("if record.calls == 1:", "if True:", "failed calls are no point of the curve"),
        ("metrics.latency if fresh else {}", "metrics.latency", "a quiet second has no latency"),
    ),
    *_rows(
        "web/live_axes.py",
        "web/test_live_view.py",
        ("ticks[:: -(-len(ticks) // MOST_TICKS)]", "ticks", "labels have room"),
        ("most = max(most, least)", "pass", "an axis has a height"),
    ),
    *_rows(
        "web/live.py",
        "web/test_live_view.py",
        ("self._looks.clear()", "pass", "no history is made up"),
        ("if stopping or now - self._taken >= min(self.pause, FRESH):", "if True:", "viewers share one look"),
    ),
    *_rows(
        "web/spans.py",
        "web/test_tracing.py",
        ("request.add_link(span.get_span_context(), attributes)", "pass", "a request links to its batch"),
        ("trace.set_span_in_context(requests[0])", "None", "a batch is kept with its first request"),
        ('if message["status"] >= 500:', "if False:", "a fault of the server is an error"),
        ("return trace.get_current_span()", "return None", "a request is known by its span"),
    ),
    *_rows(
        "serving/engine/watching.py",
        "web/test_tracing.py",
        ("            told = unwatched\n", "            raise\n", "a watch that fails hurts nobody"),
        ("{entry.reply: entry.reply.mark for entry in entries}.values()", "entry.reply.mark for entry in entries",
         "a request is in its batch once"),
    ),
)  # fmt: skip
