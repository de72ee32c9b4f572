"""Breaks of measured pipelines and of failures of their ranks that tests must see."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

PIPELINE_RUN: tuple[Mutant, ...] = (
    *_rows(
        "pipeline/measured.py",
        "pipeline/test_measured.py",
        ("start, end = start + offsets[schedule.rank], end + offsets[schedule.rank]", "pass", "clocks are aligned"),
        ("(low + high) / 2", "low", "an offset lies in the middle of what messages allow"),
        ("travels[link].append(seconds - 2 * per_message)", "travels[link].append(seconds)", "own time is no travel"),
        ("found[stage] = np.median(joined)", "found[stage] = np.mean(joined)", "of several steps the median counts"),
        ("whole = np.where(np.isnan(full), split, full)", "whole = split", "a full backward has its own time"),
        ("if follows and messages and not waits:", "if follows and messages:", "waiting is no cost of a message"),
        ("before = min(first - (rank.began", "before = 0 * min(first - (rank.began", "what comes first counts"),
    ),
    *_rows(
        "pipeline/mixed.py",
        "pipeline/test_measured.py",
        ("micro_batch[places] % 2 == 1", "micro_batch[places] % 2 == 2", "every second backward is split"),
    ),
    *_rows(
        "pipeline/costs_file.py",
        "pipeline/test_costs_file.py",
        ('document["message"] = costs.links(stages).tolist()', "pass", "links are saved"),
        ('rows["per_message"] = np.full(stages, costs.per_message)', "pass", "what a message costs is saved"),
        ("if not all(isinstance(each, wanted) for each in values):", "if False:", "what is no number is refused"),
    ),
    *_rows(
        "pipeline/advice.py",
        "pipeline/test_advice.py",
        ("return max(found)[1]", "return min(found)[1]", "what saves most is said"),
        ("given=schedule.stages, executable=True,", "given=schedule.stages,", "only what runs is advised"),
    ),
    *_rows(
        "pipeline/execution/guard.py",
        "pipeline/execution/test_failures.py",
        ("        self.tell(error, where)\n", "", "a rank tells its error"),
        ("error.add_note(", "str(", "an error says where it was"),
        ("work.wait(timedelta(milliseconds=1))", "pass", "who waits for a rank that failed is let go"),
    ),
    *_rows(
        "pipeline/execution/listening.py",
        "pipeline/execution/test_failures.py",
        ("self._poll.register(handle, select.POLLIN)", "pass", "the end of a process is seen"),
    ),
    *_rows(
        "pipeline/execution/launch.py",
        "pipeline/execution/test_failures.py",
        ("until = time.monotonic() + ENDING", "until = None", "ranks that do not end are ended"),
        ("{f' ({name})' if name else ''}", "", "a signal is named"),
    ),
    *_rows(
        "pipeline/num_micro_batches.py",
        "pipeline/test_num_micro_batches.py",
        ("found.append(-(-found[-1] // 2))", "found.append(found[-1] // 2 or 1)", "pieces do not grow beyond twice"),
        ("not tried[-1].fits or ", "", "nothing larger is tried than what does not fit"),
        ("peak / limit, peak, limit)", "peak, peak, limit)", "each rank has its own limit"),
        ("min(fitting, key=lambda one: one.seconds)", "min(tried, key=lambda one: one.seconds)", "what is taken fits"),
    ),
    *_rows(
        "training/checkpoints/stages.py",
        "pipeline/execution/test_resume.py",
        ("for one in reversed(optimizers) for", "for one in optimizers[:1] for", "the state of every rank is saved"),
        ("if name in mine}", "}", "a rank reads the state of its own weights"),
        ("if other or len(groups)", "if len(groups)", "another model is refused"),
    ),
    *_rows(
        "training/checkpoints/state.py",
        "pipeline/execution/test_resume.py",
        (
            "return model.first_name(name) if is_pipeline(model) else name",
            "return name",
            "a weight of several stages is saved under one name",
        ),
    ),
    *_rows(
        "reporting/timeline_trace.py",
        "reporting/test_timeline.py",
        ("number * timeline.schedule.ranks", "0", "a second timeline has processes of its own"),
    ),
    *_rows(
        "reporting/timeline_text.py",
        "reporting/test_timeline.py",
        ("span = max(one.makespan for one in timeline.shown)", "span = timeline.shown[-1].makespan",
         "measured and simulated share the axis"),
    ),
)  # fmt: skip
"""Rows of measured and launched pipelines."""
