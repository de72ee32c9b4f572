"""The breaks of ``make mutants``: mistakes that somebody could make, each with the test that must turn red."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows
from scripts.mutants_beyond import BEYOND
from scripts.mutants_decoder import DECODER
from scripts.mutants_engine import ENGINE
from scripts.mutants_frameworks import FRAMEWORKS
from scripts.mutants_load import LOAD
from scripts.mutants_loading import LOADING
from scripts.mutants_observe import OBSERVE
from scripts.mutants_offline import OFFLINE
from scripts.mutants_pipeline import PIPELINE
from scripts.mutants_pipeline_run import PIPELINE_RUN
from scripts.mutants_serving import SERVING
from scripts.mutants_text import TEXT
from scripts.mutants_training import TRAINING
from scripts.mutants_web import WEB
from scripts.mutants_whole_batch import WHOLE_BATCH

MUTANTS: tuple[Mutant, ...] = (
    *_rows(
        "sizes.py",
        "ground/test_sizes.py",
        ("number = -(-global_batch_size // micro)", "number = global_batch_size // micro", "the tail is a piece"),
        ("+ ((tail,) if tail else ())", "+ (tail,)", "no empty piece"),
        ("(small + 1,) * larger + (small,)", "(small,) * larger + (small,)", "evened pieces add up"),
        ("if num_micro_batches > global_batch_size:", "if False:", "no more pieces than items"),
        ("isinstance(size, bool) or not", "not", "True is no size"),
        ("range(min(size, whole), 0, -1)", "range(min(size, whole) - 1, 0, -1)", "the nearest divisor may be the size"),
        ("if evened_out.micro_batch_size != micro:", "if True:", "all three sizes of a batch are accepted again"),
    ),
    *_rows(
        "units.py",
        "ground/test_units.py",
        ('"ki": 2**10', '"ki": 10**3', "KiB is 1024 bytes"),
        ('"ms": 1e-3,', '"ms": 1e-2,', "a millisecond"),
        ("if not (value > 0 and math.isfinite(value)):", "if False:", "durations are above zero"),
        ("if count < 1:", "if False:", "a size is at least one byte"),
        ("max(0, 2 - math.floor", "max(0, 1 - math.floor", "three significant digits"),
        ("_ROUNDS_UP = 0.9995", "_ROUNDS_UP = 1.0", "never 1 000 ms"),
        ("factor is None:", "False:", "an unknown unit is refused"),
    ),
    *_rows(
        "errors.py",
        "ground/test_errors.py",
        ("class TooNoisy(NoAnswer):", "class TooNoisy(UserError):", "too noisy is no mistake of the user"),
        ('"remedy": self.remedy', '"remedy": ""', "the remedy reaches machines"),
        ("├── ModelFailed  ", "│   ├── ModelFailed  ", "the drawn tree is the real one"),
    ),
    *_rows(
        "hardware/catalogue.py",
        "hardware/test_catalogue.py",
        ('if document.get("rates") != "dense":', "if False:", "sparse rates are refused"),
        ("_HIGHEST_STEP = 2.2", "_HIGHEST_STEP = 9.0", "a sparse rate gives itself away"),
        ("if not isinstance(source, str) or not source.strip():", "if False:", "every figure has a source"),
        ("raise _unknown(str(name), files)", 'known = "t4"', "no default for an unknown device"),
    ),
    *_rows(
        "models/routing.py",
        "models/test_routing.py",
        ('"zipf": _zipf,', '"zipf": _uniform,', "a planted Zipf gate is skewed"),
        ("order = order[place < limit]", "order = order[place <= limit]", "a full expert drops the rest"),
    ),
    *_rows(
        "models/pickles.py",
        "models/test_load.py",
        ("return text.lower().endswith(SUFFIXES) or", "return", "a pickle is refused as one"),
    ),
    *_rows(
        "models/folder.py",
        "models/test_folder.py",
        ('if "auto_map" in settings:', "if False:", "a model that is only code in its folder is refused as one"),
    ),
    *_rows(
        "models/held_cache.py",
        "models/test_folder_modes.py",
        ("self.values[..., -1:, :] = value_states", "self.values[..., :1, :] = value_states", "the new token's place"),
        ("min(context, self.window - 1)", "min(context, self.window)", "a window counts the new token"),
    ),
    *_rows(
        "models/archive_contents.py",
        "models/test_archive.py",
        ('"target": _is_operator,', "", "a graph calls nothing but torch's operators"),
        ('"expr_str": _is_arithmetic,', "", "a size is arithmetic"),
        ('if entry["use_pickle"] or', "if", "no weight of an archive is unpickled"),
    ),
    *_rows(
        "models/gguf_weights.py",
        "models/test_convert.py",
        ("return paired.swapaxes(1, 2).reshape(values.shape)", "return values", "llama.cpp's order of rows is undone"),
    ),
    *_rows(
        "models/convert.py",
        "models/test_convert.py",
        ("shutil.rmtree(unfinished, ignore_errors=True)", "pass", "nothing half-written stays"),
    ),
    *_rows(
        "models/user_code.py",
        "models/test_load.py",
        ("if loss is not None and not callable(loss):", "if False:", "a loss is a function"),
    ),
    *_rows(
        "work/polynomial.py",
        "work/test_polynomial.py",
        ("c * batch**i * sequence**j", "c * batch**i", "sizes grow with the sequence too"),
        ("total.get(power, 0.0) + c", "c", "sums keep both sides"),
    ),
    *_rows(
        "work/operators.py",
        "work/test_polynomial.py",
        ("o.repeat * o.flops(batch, sequence)", "o.flops(batch, sequence)", "identical layers count each"),
    ),
    *_rows(
        "roofline/decode.py",
        "roofline/test_decode.py",
        ("2 * work.active_parameters / gain", "work.active_parameters / gain", "a multiply-add is two operations"),
        ("intensity(spec, dtype) - work.attention_flops_per_token", "intensity(spec, dtype)", "attention computes too"),
    ),
    *_rows(
        "capture/formulas.py",
        "capture/test_count.py",
        ("return below * (below + 1) // 2 +", "return below * (below - 1) // 2 +", "causal pairs"),
        ("return int(to_input) + int(to_weight)", "return 1", "a convolution's backward costs two forwards"),
        ("ATTENTION_BACKWARD = 2.5", "ATTENTION_BACKWARD = 2.0", "fused attention's backward"),
    ),
    *_rows(
        "capture/repeats.py",
        "capture/test_work.py",
        ("found.run.count += 1", "pass", "a block that repeats counts each time"),
        ("raise NotRepeated(other.name)", "pass", "blocks that only look alike all run"),
    ),
    *_rows(
        "capture/assemble.py",
        "capture/test_work.py",
        ("if not agrees(polynomial, claim.check, number[-1]):", "if False:", "sizes are checked at one more batch"),
        ("count = sum(_times(record) *", "count = max(_times(record) *", "a loop's products are counted"),
    ),
    *_rows(
        "capture/experts.py",
        "capture/test_work.py",
        ("flops=2.0 * assigned * k * n", "flops=2.0 * rows * k * n", "a token goes to top_k experts"),
        ("Moved(experts * moved.weights,", "Moved(moved.weights,", "each expert has its own weights"),
    ),
    *_rows(
        "capture/opaque.py",
        "capture/test_closed_forms.py",
        ("directions = 2 if both_ways else 1", "directions = 1", "a layer may run both ways"),
        ("data.shape[1 if batch_first else 0]", "data.shape[0 if batch_first else 1]", "which dimension the steps are"),
    ),
    *_rows(
        "roofline/tiles.py",
        "roofline/test_tiles.py",
        (
            "_ceil(tiles, multiprocessors * blocks_per_multiprocessor)",
            "tiles // multiprocessors",
            "waves are rounded up",
        ),
        ("_LOWEST_EFFICIENCY = 0.6", "_LOWEST_EFFICIENCY = 0.1", "a wave must explain the time"),
    ),
    *_rows(
        "roofline/ridge.py",
        "roofline/test_ridge.py",
        ("* intensity(spec, dtype) / 2", "* intensity(spec, dtype)", "b* = s F / (2 BW)"),
        (
            "return moved * m * n / gain if gain > 0 else None",
            "return moved * m * n / gain",
            "some layers have no ridge",
        ),
    ),
    *_rows(
        "batch/exactness.py",
        "batch/test_exactness.py",
        (
            "same = (wide == other) | (wide.isnan() & other.isnan())",
            "same = wide == other",
            "no number on both sides agrees",
        ),
        ("if difference > tolerance\n", "if difference > 1e9 * tolerance\n", "a gradient that differs is named"),
        ("exact=all(part.exact for part in parts)", "exact=any(part.exact for part in parts)", "exact in every mode"),
        ("if gap.isfinite().all() else math.inf", "", "what is infinite on one side differs"),
    ),
    *_rows(
        "batch/rows.py",
        "batch/test_independence.py",
        (
            "[by_item] if times == 1 else [by_item,",
            "[by_item] if times == 1 else [by_item, by_item] or [",
            "rows may be the inner order",
        ),
        ("own = full[each * rows.start : each * rows.stop]", "own = full", "a list is compared item by item"),
    ),
    *_rows(
        "batch/quiet.py",
        "batch/test_independence.py",
        ('if self.wide and given.get("dtype") in NARROW:', "if False:", "float32 inside is widened"),
        (
            "return result.copy_(p) if isinstance(p, Tensor) else result.fill_(p)",
            "return result",
            "dropout is put aside",
        ),
    ),
    *_rows(
        "batch/state.py",
        "batch/test_independence.py",
        ("return Carried(comparison, difference) if difference > tolerance else None", "return None", "state is seen"),
        ("if difference > tolerance:\n            path", "if False:\n            path", "buffers are compared"),
    ),
    *_rows(
        "batch/naming.py",
        "batch/test_independence.py",
        ("repair.changes(group) is not False for", "True for", "a meter is innocent"),
        ("given |= _of_class(full, fresh, whole)", "pass", "what comes after a culprit is found too"),
    ),
    *_rows(
        "batch/padding.py",
        "batch/test_independence.py",
        (
            "rows = Rows(len(kept), 0, tokens) if at_end else",
            "rows = Rows(len(kept), 0, tokens) if True else",
            "padding on the left",
        ),
    ),
    *_rows(
        "batch/gradients.py",
        "batch/test_independence.py",
        (
            "terms = [value / (weights.get(name) or 1.0) for",
            "terms = [value / weight for",
            "each term over its whole weight",
        ),
        ("report, _apart(whole, parts) if loss is not None else 0.0)", "report, 0.0)", "sums of the loss are compared"),
    ),
    *_rows(
        "batch/oom.py",
        "batch/test_oom.py",
        ("if isinstance(error, RuntimeError) else None", "", "a ValueError is no allocation failure"),
        ("cause = cause.__cause__", "cause = None", "a wrapped failure counts"),
    ),
    *_rows(
        "batch/example.py",
        "batch/test_example.py",
        ("        if other != size:\n", "        if False:\n", "two batch sizes are refused"),
        ("return sorted(axes, key=lambda axis: -strides[axis])", "return axes", "channels last stays channels last"),
    ),
    *_rows(
        "measure/timer.py",
        "measure/test_timer.py",
        ("* 1e-9 / repeats", "* 1e-9", "a repeated call is divided again"),
        ("if first >= SHORTEST_SECONDS:", "if True:", "a short call is repeated"),
    ),
    *_rows(
        "profiling/compare.py",
        "profiling/test_compare.py",
        (
            "if p_values[index] > level / (len(p_values) - rank):",
            "if p_values[index] > level:",
            "looking at many sizes",
        ),
        ("for sign in (1, -1))", "for sign in (-1, 1))", "slower is not faster"),
        ("if mine and other and mine != other:", "if False:", "unlike profiles are refused"),
    ),
    *_rows(
        "profiling/settings.py",
        "profiling/test_settings.py",
        ("delay = target - 2 * call", "delay = target - call", "a request that just missed a batch waits for it"),
        ("math.floor(delay * 1e6)", "math.floor(delay * 1e3)", "Triton counts microseconds"),
        ("if mode not in target.modes:", "if False:", "a profile of another mode says nothing"),
    ),
    *_rows(
        "reporting/save.py",
        "reporting/test_save.py",
        (
            'draft = target.with_name(f".{uuid4().hex}.tmp")',
            "draft = target",
            "readers see the old file or the new one",
        ),
        ("if not target.parent.is_dir():", "if False:", "a missing folder is told"),
    ),
    *_rows(
        "cli/app.py",
        "cli/test_every_command.py",
        ("print(f\"error: {' '.join(str(error).split())}\"", 'print(f"error: {error}\\n"', "an error is one line"),
        ("return DEFECT", "return ANSWER_IS_NO", "a crash is no answer"),
        ("    if as_json:\n        print_json", "    if False:\n        print_json", "machines get a document"),
    ),
    *_rows(
        "batch/progress.py",
        "cli/test_progress.py",
        ("auto_refresh=False", "auto_refresh=True", "no thread runs inside timed calls"),
        ("if not sys.stderr.isatty():", "if False:", "silent in a pipe"),
    ),
    *_rows(
        "cli/commands/compare.py",
        "cli/test_compare.py",
        ("return 1 if comparison.regressions else 0", "return 0", "a regression exits with 1"),
    ),
    *_rows(
        "cli/commands/profile.py",
        "cli/test_profile.py",
        ("    check_outputs(outputs)\n", "", "files are checked before anything runs"),
        ("        keep_samples(measured, outputs)\n", "", "samples are kept when they are too noisy"),
    ),
    *_rows(
        "curves/codec.py",
        "curves/test_codec.py",
        ("if not (math.isfinite(seconds) and seconds > 0):", "if False:", "times are above zero"),
        ("if len(set(sizes)) < len(sizes):", "if False:", "no size comes twice"),
    ),
    *_rows(
        "curves/objective.py",
        "curves/test_objective.py",
        ("NEAR_BEST = 0.98", "NEAR_BEST = 0.9", "within 2 % of the best"),
        ("np.argmax(batch_sizes / seconds**2)", "np.argmax(batch_sizes / seconds)", "throughput over latency"),
        ("larger[np.argmax(pays)]", "larger[-1]", "pad to the smallest size that pays"),
    ),
    *_rows(
        "curves/cliffs.py",
        "curves/test_cliffs.py",
        ("2 * np.log(len(spread)) + 6)", "0.1)", "a smooth curve has no cliff"),
        ("slope = np.diff(smooth.base) -", "slope = -np.diff(smooth.base) -", "excess is the time per item"),
    ),
    *_rows(
        "profiling/explain.py",
        "profiling/test_explain.py",
        ("if error > NOISIEST_LEVEL and levels.sigma is not None:", "if False:", "too noisy is said"),
        ("if gemm is not None and device is None:", "if False:", "a shape says nothing without a device"),
    ),
    *_rows(
        "measure/budget.py",
        "measure/test_budget.py",
        ("return min(rooms) if rooms else None", "return max(rooms) if rooms else None", "the tightest group counts"),
        ("return max(0, int(limit)", "return (int(limit)", "a group over its limit has no room"),
    ),
    *_rows(
        "batch/split.py",
        "batch/test_split.py",
        ("if own is None or (own == 1 and reading.size > 1):", "if own is None:", "one entry for all goes whole"),
        ("if as_samples and as_members:", "if False:", "a list that reads in two ways is refused"),
        ("    reading.cut(batch)  # refuses", "    pass  # refuses", "what cannot be cut is told first"),
        ("or sum(sizes) != reading.size", "or False", "the pieces are the whole batch"),
    ),
    *_rows(
        "batch/packed.py",
        "batch/test_split.py",
        ("return item[start : stop + 1] - item[start]", "return item[start : stop + 1]", "offsets begin at 0"),
        ("else longest", "else item", "the longest of the piece"),
    ),
    *_rows(
        "curves/micro_batches.py",
        "curves/test_micro_batches.py",
        (
            "(sizes.num_micro_batches - 1) * self.adding",
            "sizes.num_micro_batches * self.adding",
            "the first adds nothing",
        ),
        (
            "full = sizes.num_micro_batches - bool(sizes.tail)",
            "full = sizes.num_micro_batches",
            "a tail is no full piece",
        ),
        ("return update + ", "return sizes.num_micro_batches * update + ", "one update a step"),
    ),
    *_rows(
        "curves/micro_batch_choice.py",
        "curves/test_micro_batches.py",
        ("value * (1 - shares[size])", "value", "a piece holds no update"),
        ("row.fits is not False]\n    chosen", "True]\n    chosen", "what does not fit is not chosen"),
        ("round(line) + _gradients_left_out(memory)", "round(line)", "gradients of earlier pieces stand beside"),
        ("0 if memory.fixed_bytes >= held else", "0 if False else", "gradients are counted once"),
        ("accumulation * value * shares[size]", "value * shares[size]", "a predicted piece holds a part of an update"),
        ("[*sizes, global_batch_size] if", "sizes if", "the whole batch is a size"),
    ),
    *_rows(
        "profiling/search.py",
        "profiling/test_search.py",
        ("updates.append(min(update, seconds[-1]))", "updates.append(update)", "an update is a part of its call"),
    ),
    *PIPELINE,
    *PIPELINE_RUN,
    *SERVING,
    *LOADING,
    *LOAD,
    *WEB,
    *OBSERVE,
    *WHOLE_BATCH,
    *OFFLINE,
    *FRAMEWORKS,
    *TRAINING,
    *BEYOND,
    *ENGINE,
    *DECODER,
    *TEXT,
)
