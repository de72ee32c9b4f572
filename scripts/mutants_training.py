"""The breaks of training in micro-batches; see `mutants_table.py`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

TRAINING: tuple[Mutant, ...] = (
    *_rows(
        "training/normalise.py",
        "training/test_exactness.py",
        ("return self.sum / self.weight if self.weight", "return self.sum if self.weight", "the loss is divided"),
    ),
    *_rows(
        "training/normalise.py",
        "training/test_exactness.py::test_gradients_in_float64",
        ("if pair.weight:  # a mean", "if True:  # a mean", "a piece without weight has no loss"),
        (
            "return next(iter(weights)) if len(weights) == 1 else None",
            "return max(weights)",
            "each term has its weight",
        ),
    ),
    *_rows(
        "training/normalise.py",
        "training/test_mistakes.py",
        ("if weight.requires_grad:", "if False:", "a weight is a constant"),
        ("if not math.isclose(total.weight, expected, rel_tol=1e-5):", "if False:", "weights given first are checked"),
    ),
    *_rows(
        "training/passes.py",
        "training/test_exactness.py::test_gradients_in_float64",
        ("(pair.weight or self.ranks.always_backward)", "True", "a piece without weight adds nothing"),
    ),
    *_rows(
        "training/passes.py",
        "training/test_step.py",
        ("            del pairs, piece\n", "", "a piece leaves nothing behind"),
    ),
    *_rows(
        "training/gradients.py",
        "training/test_step.py",
        ("parameter.grad_dtype = torch.float32", "pass", "narrow gradients are summed in fp32"),
        ("gradient.mul_(factor)", "pass", "sparse gradients are scaled"),
    ),
    *_rows(
        "training/gradients.py",
        "training/test_exactness.py::test_clipping_by_the_global_norm",
        (
            "(norm_of or global_norm)(parameters) * factor",
            "(norm_of or global_norm)(parameters)",
            "the norm is that of the mean",
        ),
    ),
    *_rows(
        "training/update.py",
        "training/test_step.py",
        ("if skipped is None and scheduler is not None:", "if scheduler is not None:", "no schedule without a step"),
        ("scaler.unscale_(optimizer)", "pass", "clipping sees unscaled gradients"),
    ),
    *_rows(
        "training/memory/snapshot.py",
        "training/test_mistakes.py",
        ("buffer.copy_(values)", "pass", "buffers are as before a mistake"),
        ("        set_random_state(self.random)\n", "", "random state is as before a mistake"),
    ),
    *_rows(
        "training/checkpoints/folder.py",
        "training/test_checkpoint.py",
        ("if found != expected:", "if False:", "a damaged file is seen"),
        ("checkpoints(path.parent)[keep:]", "checkpoints(path.parent)[keep + 1 :]", "only the last few stay"),
        ("sorted(found, reverse=True)", "sorted(found)", "the newest is taken"),
    ),
    *_rows(
        "training/checkpoints/state.py",
        "training/test_checkpoint.py",
        ("step.optimizer.state.clear()", "pass", "making room counts no step"),
        ("    _keep_dtypes(optimizer, state)\n", "", "fp32 state of bf16 weights keeps its bits"),
        ('parameter.copy_(state["outside"][name])', "pass", "parameters outside of the model are put back"),
    ),
    *_rows(
        "training/checkpoints/rank_state.py",
        "training/test_checkpoint.py",
        ("step._recovery.limit = limit", "pass", "what memory allowed is kept"),
        ("    set_random_state(state)\n", "", "random numbers go on"),
    ),
    *_rows(
        "training/checkpoints/plain_values.py",
        "training/test_checkpoint.py",
        ("memory if local.data_ptr() else name, name", "name, name", "tied weights are saved once"),
        ('"counter" if isinstance(value, Counter) else "dict"', '"dict"', "a counter stays one"),
    ),
    *_rows(
        "training/checkpoints/samples.py",
        "training/test_samples.py",
        ("SeedSequence([seed, epoch])", "SeedSequence([seed])", "each epoch has its own order"),
        ("divmod(start, self.samples_per_epoch)", "divmod(start, self.length)", "dropped samples are not counted"),
        ("if not samples:", "if False:", "a rank without samples has no batch"),
    ),
    *_rows(
        "training/noise_scale.py",
        "training/test_noise_scale.py::test_the_estimates_are_means_over_pairs_of_pieces",
        ("(square_of_sum - squares) / (1 - shares)", "square_of_sum - squares", "fewer pairs of pieces, less signal"),
        ("samples * (squares - shares * squared_gradient)", "samples * squares", "signal is no noise"),
    ),
    *_rows(
        "training/noise_scale.py",
        "training/test_noise_scale.py::test_the_start_of_a_run_is_forgotten",
        ("max(2 / (self.steps + 1), 2 / (WINDOW + 1))", "1 / self.steps", "the start of a run is forgotten"),
    ),
    *_rows(
        "training/piece_norms.py",
        "training/test_noise_scale.py::test_the_norms_are_those_of_each_piece_alone",
        ("norm * unit / self._scale", "norm * unit", "a scaled loss has scaled gradients"),
        ("norm * unit / self._scale", "norm / self._scale", "sums are divided by the weight of all"),
    ),
    *_rows(
        "training/piece_norms.py",
        "training/test_noise_scale.py::test_a_gradient_in_two_parts_is_not_measured",
        ("if key in self._parts:", "if False:", "a gradient in two parts is not measured"),
    ),
    *_rows(
        "training/ranks/meeting.py",
        "training/test_noise_scale.py::test_bytes_and_calls_are_what_torch_counts",
        ('"all_reduce": 2 * share', '"all_reduce": share', "a sum goes round twice"),
    ),
    *_rows(
        "training/memory/unfinished.py",
        "training/test_unfinished.py",
        ("if found and any(key in self._made for key in keys):", "if False:", "no write rests on lost values"),
        ("self._made[key] = self._met[key]", "pass", "writes of a second try count"),
    ),
    *_rows(
        "training/memory/safeguard.py",
        "training/test_unfinished.py",
        (
            "if self.copies is None and self._moved():\n            return",
            "if False:\n            return",
            "what moved once moves not again",
        ),
        ('group.get("fused") or', "False or", "fused updates are not counted"),
    ),
    *_rows(
        "training/proof.py",
        "training/test_check.py",
        ("if errors[1] <= max(", "if True or errors[1] <= max(", "the working dtype is proved too"),
        (
            "        own._undo(start)\n    raise NoAnswer(",
            "        pass\n    raise NoAnswer(",
            "a proof changes nothing",
        ),
    ),
    *_rows(
        "training/exact_copy.py",
        "training/test_check.py",
        ("report.exact and apart <= report.tolerance", "report.exact", "the loss does not depend on the split"),
    ),
    *_rows(
        "training/normalise.py",
        "training/test_mistakes.py",
        ("if total.weight and not math.isfinite(total.sum):", "if False:", "no update with a loss that is no number"),
    ),
)
