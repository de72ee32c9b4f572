"""The breaks of steps inside other frameworks' loops; see `mutants_table.py`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as rows

FRAMEWORKS: tuple[Mutant, ...] = (
    *rows(
        "training/integrations/mean_loss.py",
        "training/test_transformers_trainer.py",
        ("(number if self.is_sum else number * weight)", "number", "a mean times its weight is a sum"),
        ("if math.isclose(once, 2 * halved, rel_tol=tolerance):", "if False:", "what divides as told gives sums"),
        ("if abs(sum(parts) - total) <=", "if True or abs(sum(parts) - total) <=", "sums of two add up to both"),
        ("rows in ([fewest], [most], [fewest, most])", "rows in ([0], [1], [0, 1])", "unlike items are tried"),
    ),
    *rows(
        "training/integrations/transformers_trainer.py",
        "training/test_transformers_trainer.py",
        ("changed.per_device_train_batch_size *= args.gradient_accumulation_steps", "pass", "the batch keeps its size"),
        ("            before.restore()", "            pass", "a trial draws no numbers"),
        ("used |= labels.ne(IGNORED).any(0)", "pass", "a label in the padding stays"),
        ("value[:, :length].contiguous()", "value[:, -length:].contiguous()", "padding is at the end"),
    ),
    *rows(
        "training/integrations/lightning_module.py",
        "training/test_lightning_module.py",
        ("if any(total.weight for total in done.totals.values()):", "if True:", "a batch without weight is skipped"),
        ("with precision.train_step_context():", "with nullcontext():", "pieces run in the Trainer's precision"),
        ('if name not in ("exact_step", "done", "_batch")', "", "a copy begins anew"),
        ("if done is None or self.trainer.accumulate_grad_batches > 1:", "if False:", "no accumulation besides"),
    ),
    *rows(
        "training/integrations/accelerated.py",
        "training/test_accelerated.py",
        ("if kind in _OWN_BACKWARD:", "if False:", "engines with a backward of their own are refused"),
        ("if steps > 1:", "if False:", "no accumulation besides"),
        ("max_norm=max_norm,", "max_norm=None,", "clipping"),
        ("scheduler=scheduler,", "scheduler=None,", "the schedule steps"),
    ),
)  # fmt: skip
