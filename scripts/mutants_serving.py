"""Breaks of the serving room; see `scripts.mutants_table`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

SERVING: tuple[Mutant, ...] = (
    *_rows(
        "serving/decisions/policies.py",
        "serving/test_policies.py",
        ("min(until, view.oldest + view.max_queue_delay)", "until", "no item waits beyond the delay that was set"),
        ("> CLEARLY * (n + pace.owed) * pace.return_time", "> 0", "clients that are slow to return are not waited for"),
        ("* (1 - pace.gap / independent)", "", "independent requests are no burst"),
        ("view.now + seconds(max(item.cost, item.length)) <= item.deadline", "True", "what is late is not launched"),
        (
            "places = fitting(view, max(1, min(most, len(places) - 1)))",
            "break",
            "a batch shrinks to meet its first deadline",
        ),
    ),
    *_rows(
        "serving/decisions/choose.py",
        "serving/test_policies.py",
        ("padded > MOST_PADDED * real", "False", "padded work is bounded"),
        ("low = min(head, high - best)", "low = head", "the largest run of lengths is found"),
        ("if item.key == head.key", "", "keys share no batch"),
    ),
    *_rows(
        "serving/decisions/queue.py",
        "serving/test_policies.py",
        ("due - HEAD_START * facts.priority", "due", "priorities go first"),
        ("min(facts.deadline, facts.arrived + PATIENCE)", "facts.deadline", "nothing waits for ever"),
    ),
    *_rows(
        "serving/decisions/arrivals.py",
        "serving/test_arrivals.py",
        ("self._owed = max(0, self._owed - len(times))", "pass", "who came back is owed no more"),
        ("if now > self._answered_at + 2 * self._return:", "if False:", "who left is forgotten"),
    ),
    *_rows(
        "serving/decisions/latency.py",
        "serving/test_latency.py",
        ("if together <= least:", "if False:", "batches stop below a cliff"),
        ("1 / OUTLIER), OUTLIER)", "1 / OUTLIER), 1e9)", "one interrupted launch changes little"),
        (
            "self._drift + self._collected",
            "0 * self._drift + self._collected",
            "a slower machine is slower at every size",
        ),
    ),
    *_rows(
        "serving/decisions/limits.py",
        "serving/test_latency.py",
        ("if delay >= target:", "if False:", "a delay beyond the target is a contradiction"),
        ("(wishes.max_queue_delay or 0.0)) / TURNS", "(wishes.max_queue_delay or 0.0))", "a batch may be ahead"),
        ("if latency.gain() >= HELPS else latency.curve()[0][0]", "", "what cannot be helped is not batched"),
    ),
    *_rows(
        "serving/decisions/simulate.py",
        "serving/test_simulate.py",
        ("room = self._most - len(self)", "room = 10**9", "the simulated queue is bounded"),
        ("* next(ratios)", "", "the time of a batch varies"),
    ),
    *_rows(
        "serving/decisions/isolate.py",
        "serving/test_isolate.py",
        ("return [batch[:half], batch[half:]]", "return [[entry] for entry in batch]", "halves, not one by one"),
        ("if not entry.settled]\n        if len(batch)", "]\n        if len(batch)", "who is settled is left out"),
        ("    if stateful:", "    if False:", "a stateful function runs once"),
        ("if self._passed >= RAISE_AFTER:", "if True:", "the limit is raised slowly"),
        ("    if count != items:", "    if False:", "one result for each item"),
        ("entry.retried = True", "pass", "a killer is tried once more only"),
    ),
    *_rows(
        "serving/engine/influx.py",
        "serving/test_influx.py",
        ("self._quiet[loop] <= QUIET_TURNS", "False", "requests of several turns share a batch"),
        (
            "        self._quiet[loop] = 0\n",
            "        self._quiet.setdefault(loop, 0)\n",
            "each request begins the quiet anew",
        ),
    ),
    *_rows(
        "serving/decisions/policies.py",
        "serving/test_influx.py",
        ("if view.reading:", "if False:", "requests that are being read are waited for"),
        (
            "_began(view) + seconds, GATHER_READING",
            "NEVER, GATHER_READING",
            "a loop that is never quiet does not stop batches",
        ),
    ),
    *_rows(
        "serving/engine/service.py",
        "serving/test_batcher.py",
        ("if self._queue.room_for(tenant) >= count else", "if True else", "the bound of the queue is exact"),
        ("                    self._queue.remove(entry)\n", "", "cancelled work never runs"),
        ("waited = self._queue.remove(entry)", "waited = False", "expired work never runs"),
        ("            self._draining = True", "            pass", "draining refuses what comes"),
    ),
    *_rows(
        "serving/engine/carrier.py",
        "serving/test_processes.py",
        ("bytearray(other[start : start + size])", "bytearray(other[:size])", "each tensor has its own place"),
    ),
    *_rows(
        "serving/engine/workers.py",
        "serving/test_processes.py",
        (
            "if self.alive:\n            return\n        self.stop()",
            "if self._carrier:\n            return\n        self.stop()",
            "a process that died while idle is seen",
        ),
    ),
    *_rows(
        "serving/engine/module_runner.py",
        "serving/test_modules.py",
        (".to(device).eval()", ".to(device)", "a served copy is in evaluation mode"),
    ),
    *_rows(
        "serving/engine/same_answer.py",
        "serving/test_modules.py",
        ("exact=largest <= tolerance,", "exact=True,", "answers alone and in a batch agree"),
    ),
    *_rows(
        "serving/engine/fast_linear.py",
        "serving/test_modules.py",
        ("type(layer) is not nn.Linear", "not isinstance(layer, nn.Linear)", "only plain layers are packed"),
        (
            "if relative_difference(linear(x, layer.weight, layer.bias), form(x)) > tolerance:",
            "if False:",
            "equal to rounding",
        ),
    ),
    *_rows(
        "serving/engine/prepare.py",
        "serving/test_batcher_settings.py",
        ("stalled == STALLS", "stalled == 1", "sizes are tried beyond one that is slow"),
        ("stalled = 0 if cost", "stalled = stalled if cost", "a size that is faster again starts the count anew"),
    ),
    *_rows(
        "serving/engine/undisturbed.py",
        "serving/test_undisturbed.py",
        ("- (after - before)", "", "time that others had the core does not count"),
        ("before = _waited()", "before = 0.0", "only what was waited for during the call"),
    ),
)
