"""The breaks of offline inference and of pieces by length; see `mutants_table.py`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as rows

OFFLINE: tuple[Mutant, ...] = (
    *rows(
        "batch/token_budget.py",
        "batch/test_token_budget.py",
        ("if turn > turns[-1]:", "if turn >= turns[-1] - 1:", "candidates that are never best go"),
        ("reach[last] + 1)", "len(ascending) + 1)", "a run above the budget is no piece"),
        ("<= tokens:\n            end += 1", "<= tokens + 1:\n            end += 1", "the budget is kept"),
        ("if sizes and held + length <= tokens:", "if sizes:", "sequences end to end keep the budget"),
    ),
    *rows(
        "batch/lengths.py",
        "batch/test_lengths.py",
        ("return (mask == 0) if hides else (mask != 0)", "return mask != 0", "a padding mask hides"),
        ("if len(axes) > 1:\n        return", "if False:\n        return", "pairs of tokens keep the batch whole"),
        ("return all(bool((part == dropped[0]", "return True or all(bool((part == dropped[0]", "only padding is cut"),
    ),
    *rows(
        "batch/split.py",
        "batch/test_lengths.py",
        (
            "value.index_select(0, torch.tensor(items",
            "value.index_select(0, torch.tensor(sorted(items)",
            "order of taking",
        ),
    ),
    *rows(
        "training/padding.py",
        "training/test_token_budget.py",
        ("    exact = whole.keys() == less.keys() and", "    exact = True or", "a loss that reads padding keeps it"),
    ),
    *rows(
        "training/cutting.py",
        "training/test_token_budget.py",
        ("if tokens > longest else None", "if tokens > 1 else None", "one item alone ends the retries"),
    ),
    *rows(
        "serving/offline/growing.py",
        "serving/test_growing.py",
        ("(failed is None or trial.size < failed)", "True", "a size that ran out of memory is given up"),
        ("if not failed and beyond < BEYOND", "if beyond < BEYOND", "no second failure while growing"),
        ("counts and _runs(trials, latest.size) < RUNS", "counts and False", "each size runs twice"),
    ),
    *rows(
        "serving/offline/joining.py",
        "serving/test_offline.py",
        ("elif len(leaf) != count:", "elif False:", "an entry for each item"),
        (
            "there = columns_at(range(span.start + done.offset",
            "there = columns_at(range(span.start",
            "left padding stays left",
        ),
    ),
    *rows(
        "serving/offline/work.py",
        "serving/test_offline.py",
        ("order.sort(key=lambda place: -lengths[place])", "pass", "items are sorted by length"),
        (
            '            if found.matters:\n                logger.warning("%s All',
            '            if False:\n                logger.warning("%s All',
            "padding that matters stays",
        ),
        ("where = _together([queue.block.start + place", "where = _together([place", "windows follow each other"),
    ),
    *rows(
        "serving/offline/placing.py",
        "serving/test_offline.py",
        ("            module.training = training", "            pass", "the model's modes are put back"),
        ("        model.eval()", "        pass", "evaluation mode"),
    ),
)
