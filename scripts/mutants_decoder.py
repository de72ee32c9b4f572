"""Breaks of decoders, their cache and their layers; see `scripts.mutants_table`."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

DECODER: tuple[Mutant, ...] = (
    *_rows(
        "llm/models.py",
        "llm/test_models.py",
        ("1.0 + weight.float(), eps", "weight.float(), eps", "Gemma's norms count from 1"),
        ("config.attn_logit_softcapping if family.softcap else None", "None", "Gemma 2 caps its scores"),
        ("1.0 if scale is None else float(scale.to(read.dtype))", "1.0", "Gemma scales its embeddings"),
        ('f"{before}original_inv_freq"', 'f"{kinds[0]}_original_inv_freq" if kind else "original_inv_freq"', "ropes"),
        ("kinds.index(config.layer_types[index])", "0", "each kind of layer has its own rotary positions"),
        ("context = min(context, ", "min(context, ", "longrope ends where all positions would change"),
        ("if module._forward_hooks or", "if False and module._forward_hooks or", "a hook is not passed by"),
        ("and type(module) is not nn.Linear", "and False", "a replaced layer is refused"),
        ('"Qwen2ForCausalLM": Family(window="layer")', '"Qwen2ForCausalLM": Family()', "layers with a window"),
        ("config.norm_topk_prob if family.normalised is None", "True if family.normalised is None", "expert weights"),
    ),
    *_rows(
        "llm/decoder.py",
        "llm/test_models.py",
        ("addcmul_(right, sin, value=-1)", "addcmul_(right, sin, value=1)", "rotary positions turn one way"),
        ("[..., half : 2 * half]", "[..., -half:]", "only a part of a head may turn"),
        ("            cache.clear(step.unfilled)\n", "            pass\n", "what a block held reaches nobody"),
        ("output.index_add_(0, tokens, found.to(x.dtype))", "output.index_copy_(0, tokens, found.to(x.dtype))", "sum"),
        ("if self.normalised:", "if False:", "the experts' weights sum to 1 where they should"),
        ("torch.tanh(found / self.softcap) * self.softcap", "found", "capped logits"),
        ("if not len(x):", "if False:", "a step without logits"),
    ),
    *_rows(
        "llm/attention.py",
        "llm/test_models.py",
        ("hidden |= places <= own - window", "hidden |= places < own - window", "the window holds its own token"),
        ("hidden = places > own", "hidden = places >= own + 2", "no token sees a later one"),
        ("(0, 0, self.place, after)", "(0, 0, after, self.place)", "a tile's tokens lie at their own places"),
        (
            "blocks.index_copy_(1, target, blocks.index_select(1, source))",
            "blocks[:, target[:1]] = blocks[:, source[:1]]",
            "all",
        ),
    ),
    *_rows(
        "llm/row_pieces.py",
        "llm/test_models.py",
        ("hidden = (slots < low) | (slots >= high)", "hidden = slots >= high", "a window in gathered rows"),
        ("hidden = (slots < low) | (slots >= high)", "hidden = slots < low", "slots behind the last token are masked"),
        ("max(0, position + 1 - self.window)", "max(0, position - self.window)", "a window of exactly its size"),
        (
            "return slice(offset + self._first(row.start), offset + row.end)",
            "return slice(offset, offset + row.end)",
            "in place",
        ),
        (
            "if any(block != lowest + place",
            "if False and any(block != lowest + place",
            "only neighbours are read in place",
        ),
        (
            "range(self._first(start) // size,",
            "range(self._first(row.start) // size,",
            "a tile's keys follow from its place",
        ),
    ),
    *_rows(
        "llm/runner.py",
        "llm/test_models.py",
        (
            "                    self.cache.copy([move])\n",
            "                    pass\n",
            "what a block holds moves with it",
        ),
        (
            "wanted = [firsts[index] + len(rows[index].ids) - 1",
            "wanted = [firsts[index]",
            "the logits of the last token",
        ),
    ),
    *_rows(
        "llm/placement.py",
        "llm/test_placement.py",
        ("or other in busy", "", "what is in use stays"),
        ("place + 1 == len(self._block)", "False", "the last place has none behind it"),
        ("        self._put(other, free)\n", "", "no two blocks at one place"),
    ),
    *_rows(
        "llm/packed.py",
        "llm/test_packed.py",
        ("whole = pad(x, (0, 0, 0, -rows % self.tile))", "whole = x", "every tile has the same rows"),
        ("weight.new_zeros(weight.shape[0]) if bias is None else bias", "bias", "some fused layers have no bias"),
    ),
)
