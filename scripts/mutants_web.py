"""Breaks of the web front; see `scripts.mutants_table`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

WEB: tuple[Mutant, ...] = (
    *_rows(
        "web/statuses.py",
        "web/test_predict.py",
        ("(DeadlineExceeded, 504),", "", "a deadline is 504"),
        ("(InvalidOutput, 500),", "", "a wrong output is the server's fault"),
        ("round(error.retry_after)", "int(error.retry_after)", "Retry-After is rounded"),
        ("text = lines[0] if", 'text = " ".join(lines) if', "no traceback reaches a client"),
    ),
    *_rows(
        "web/bodies.py",
        "web/test_predict.py",
        ("if size > limit:", "if False:", "the limit holds while a body is read"),
    ),
    *_rows(
        "web/arrays.py",
        "web/test_arrays.py",
        (
            "if dtype.kind not in NUMERIC:\n        raise ValueError",
            "if False:\n        raise ValueError",
            "no pickle is read",
        ),
        ("if any(side < 0 for side in shape):", "if False:", "a side is not below zero"),
        ("astype(np.uint32) << 16", "astype(np.uint32) << 15", "bfloat16 is widened exactly"),
    ),
    *_rows(
        "web/array_items.py",
        "web/test_items.py",
        ('if not np.can_cast(value.dtype, dtype, "same_kind"):', "if False:", "fractions are no whole numbers"),
        (
            'if dtype.kind == "f" and not (np.abs(array) <= np.finfo(dtype).max).all():',
            "if False:",
            "a number fits into its dtype",
        ),
        ("len(lengths) > 1 or lengths & set(free)", "lengths & set(free)", "a side that differs is free"),
        ("len(shape) == len(wanted) and all(", "all(", "as many sides as the examples"),
    ),
    *_rows(
        "web/items.py",
        "web/test_items.py",
        ("if missing or unknown:", "if missing:", "no member is dropped in silence"),
        ("or isinstance(result, MicrobatchError)", "", "our own errors keep their status"),
        ("return float if float in kinds else int", "return int", "a fractional example allows fractions"),
    ),
    *_rows(
        "web/http.py",
        "web/test_predict.py",
        ("return next((answer for answer in answers if answer.status >= DEFECT), None)", "return None", "whose fault"),
        (
            "place: item for place, item in enumerate(asked.items) if isinstance",
            "place: item for place, item in [] if isinstance",
            "a bad item in a stream",
        ),
        (
            "results[place] = blamed(result, form, items[place])",
            "results[good[0]] = blamed(result, form, items[place])",
            "to its own place",
        ),
        ("if name not in ENVELOPE]", "if False]", "a misspelt name is told"),
    ),
    *_rows(
        "web/negotiation.py",
        "web/test_negotiation.py",
        ("key=lambda pair: -pair[0]", "key=lambda pair: 0", "the form wanted most"),
        ("if weight > 0]", "]", "q=0 is not wanted"),
    ),
    *_rows(
        "web/watch.py",
        "web/test_predict.py",
        ("            self._task.cancel()\n", "            pass\n", "a vanished client's work is cancelled"),
    ),
    *_rows(
        "web/keys.py",
        "web/test_application.py",
        ("if hmac.compare_digest(known, digest)]", "]", "another key is none"),
        ('if scheme.lower() == b"bearer" else api_key', "or api_key", "a scheme has its name"),
    ),
    *_rows(
        "web/routes.py",
        "web/test_application.py",
        ('method = "GET" if method == "HEAD" else method', "pass", "HEAD is GET"),
        ("if not there:", "if True:", "another method is 405"),
    ),
    *_rows(
        "web/application.py",
        "web/test_application.py",
        ("        self._stop.set()\n", "", "streams learn of the end"),
    ),
    *_rows(
        "web/health.py",
        "web/test_application.py",
        ("not application.stopping and all(", "all(", "readiness ends before the end"),
    ),
    *_rows(
        "web/connections.py",
        "web/test_server.py",
        ("if self._header_bytes > HEADER_LIMIT:", "if False:", "headers end"),
        (
            "            elif self._due is None:\n                self._expect_headers()\n",
            "",
            "later headers come in time",
        ),
        ("elif self._due is None and self._answered_early():", "elif False:", "leftovers end"),
    ),
    *_rows(
        "web/server.py",
        "web/test_server.py",
        ("signal.signal(number, done)", "signal.getsignal(number)", "SIGTERM ends with 0"),
    ),
    *_rows(
        "web/application.py",
        "web/test_server.py",
        ("            elif self.stopping:\n", "            elif False:\n", "who waits too long is told"),
    ),
    *_rows(
        "serving/engine/batcher.py",
        "web/test_server.py",
        (
            "        finally:  # nobody waits for the rest\n            service.withdraw(entries)",
            "        finally:\n            pass",
            "a stream that is left",
        ),
    ),
    *_rows(
        "web/predict_operation.py",
        "web/test_openapi.py",
        ('"additionalProperties": False}', '"additionalProperties": True}', "the document forbids what is refused"),
    ),
    *_rows(
        "web/direct.py",
        "web/test_direct.py",
        ("    HEADER: NEVER,\n", "", "a tenant goes the long way"),
        (
            "if asked.many or asked.stream or isinstance(item, Exception):",
            "if isinstance(item, Exception):",
            "several items",
        ),
        ("application.keyed or application.deadline is not None or", "application.keyed or", "deadlines are kept"),
        ("result = blamed(result, form, item)\n", "", "whose fault it is"),
        ("return small and typed", "return typed", "a body of unknown size"),
    ),
    *_rows(
        "web/connections.py",
        "web/test_direct.py",
        (
            "            if cycle.more_body:\n                self._go_the_long_way(cycle)\n",
            "            pass\n",
            "a body in two parts",
        ),
        ('cycle.scope["extensions"][GONE].append(withdraw)', "pass", "who has gone is withdrawn"),
        ("if lane is not None and self._is_idle() and", "if lane is not None and", "answers are in order"),
        ("and parser.should_keep_alive()", "", "who wants the connection closed"),
    ),
    *_rows(
        "web/connections.py",
        "web/test_hard_clients.py",
        (
            "            first.listens = True\n            self.flow.resume_reading()\n",
            "            pass\n",
            "who goes with more behind is seen",
        ),
    ),
)
