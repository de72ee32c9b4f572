"""The breaks of losses, terms and layers that see the whole batch; see `mutants_table.py`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as rows

WHOLE_BATCH: tuple[Mutant, ...] = (
    *rows(
        "training/joint/two_pass.py",
        "training/test_two_pass.py::test_every_generator_is_replayed_whatever_the_loss_draws",
        ("    start.restore_random()\n", "", "the second pass draws what the first drew"),
    ),
    *rows(
        "training/joint/values.py",
        "training/test_two_pass.py::test_gradients_of_joint_losses",
        ("self._pieces.index(index))", "0)", "each piece has its own part of the gradient"),
    ),
    *rows(
        "training/joint/terms.py",
        "training/test_two_pass.py::test_gradients_of_joint_losses",
        ("return gradient if index == 0 else None", "return gradient", "what is shared has its gradient once"),
    ),
    *rows(
        "training/joint/terms.py",
        "training/test_two_pass.py::test_balancing_terms_of_experts",
        ("lambda _, row: row.sum(0) / whole", "lambda _, row: row.mean(0) / whole", "means are of the whole batch"),
    ),
    *rows(
        "training/joint/terms.py",
        "training/test_two_pass.py::test_a_mean_over_nothing_has_no_weight",
        ("if not whole:", "if False:", "a mean over nothing has no weight"),
    ),
    *rows(
        "training/joint/terms.py",
        "training/test_two_pass.py::test_memory_holds_one_piece_and_the_representations",
        ("return plain.clone() if plain", "return plain if plain", "a row kept does not keep the layer behind it"),
    ),
    *rows(
        "training/joint/exact_batch_norm.py",
        "training/test_batch_norm.py::test_exact_batch_norms",
        ("* call.by_channel(means[1])", "* 0", "the gradient goes through the variance"),
        ("own - call.by_channel(means[0])", "own", "the gradient goes through the mean"),
        ("back.give(parameter, own.to(parameter.dtype))", "pass", "weight and bias are trained"),
        ("counters if index else {}", "{}", "a batch is counted once"),
    ),
    *rows(
        "training/joint/exact_batch_norm.py",
        "training/test_batch_norm.py::test_dropout_draws_the_same_in_every_pass",
        ("self._random.begin(index)", "pass", "a window draws what the first pass drew"),
    ),
    *rows(
        "training/joint/running_statistics.py",
        "training/test_batch_norm.py::test_exact_batch_norms",
        ("(whole.count / (whole.count - 1))", "1.0", "the running variance divides by N - 1"),
    ),
    *rows(
        "training/joint/cuts.py",
        "training/test_batch_norm.py::test_memory_holds_a_window_and_what_leaves_it",
        ("return tensor.detach() if inside", "return tensor if inside", "nothing of a window is held afterwards"),
        ("if inside else None", "if True else None", "only a window is kept"),
    ),
    *rows(
        "training/joint/going_back.py",
        "training/test_batch_norm.py::test_exact_batch_norms",
        ("gradient = gradient.sum_to_size(*shape)", "pass", "gradients of what was broadcast are added up"),
    ),
    *rows(
        "training/joint/batch_norm.py",
        "training/test_batch_norm.py::test_frozen_batch_norms_use_their_running_statistics",
        ("layer.training = False", "pass", "frozen layers use running statistics"),
    ),
    *rows(
        "training/joint/whole_batch.py",
        "training/test_batch_norm.py::test_what_was_not_chosen_is_told_once",
        ("        self._warned = True\n", "", "a warning is given once"),
    ),
    *rows(
        "training/ranks/replicated.py",
        "training/test_joint_ranks.py",
        ("self._meeting.tell(failure, memory=True)", "self._meeting.tell(failure)", "ranks begin again together"),
    ),
    *rows(
        "training/joint/values.py",
        "training/test_joint_ranks.py",
        (
            "inputs=None if first else list(wanted.values())",
            "inputs=None",
            "the loss's own parameters count once",
        ),
    ),
)
