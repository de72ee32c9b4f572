"""Breaks of what leads from a name to a server: loading, sentence embeddings, OpenAI's API, ``serve``."""

from __future__ import annotations

from scripts.mutant import Mutant
from scripts.mutant import rows_of as _rows

LOADING: tuple[Mutant, ...] = (
    *_rows(
        "serving/loading/sentences.py",
        "serving/test_sentences.py",
        ("(hidden * mask).sum(1) / mask.sum(1).clamp(min=SMALLEST_SUM)\n\n\ndef _mean_over_root",
         "hidden.mean(1)\n\n\ndef _mean_over_root", "padding is no part of a mean"),
        ('hidden.masked_fill(mask == 0, float("-inf")).amax(1)', "hidden.amax(1)", "padding is never the largest"),
        ("return hidden[torch.arange(len(hidden), device=hidden.device), ends]", "return hidden[:, -1]",
         "the last token is none of padding"),
        ("normalize(vectors, dim=-1) if self.normalised else vectors", "vectors", "vectors of length one"),
        ("attention_mask=attention_mask).last", "attention_mask=None).last", "padding is hidden from attention"),
        ("folder.prefix, folder.lower)", '"", folder.lower)', "a folder's prompt is put before a text"),
    ),
    *_rows(
        "serving/loading/texts.py",
        "serving/test_sentences.py",
        ("    tokenizer.no_padding()\n", "", "a tokenizer that pads is told not to"),
        ("tokenizer.enable_truncation(longest)", "pass", "a text is cut where the folder says"),
        ("if ids.min() < 0 or ids.max() >= self.vocabulary:", "if False:", "no token that the model has not"),
        ("if ids.size > self.longest:", "if False:", "no more tokens than the model takes"),
        ("mask[place, : len(row)] = 1", "mask[place] = 1", "padding is marked"),
    ),
    *_rows(
        "serving/loading/reading.py",
        "serving/test_sentences.py",
        ("yield places[place], answer", "yield place, answer", "answers keep their places"),
    ),
    *_rows(
        "serving/loading/modules.py",
        "serving/test_loading.py",
        ("given = given if limit is None else _limited(text, given, limit)", "", "an archive is run within its range"),
        ('constants["use_cache"] = False', "pass", "no cache is among the answers"),
    ),
    *_rows(
        "serving/loading/named.py",
        "serving/test_loading.py",
        ("**{**found.settings, **given}", "**given", "what the decorator set stays"),
        ("sys.path.insert(0, str(folder))", "pass", "a file imports its neighbours when it runs"),
    ),
    *_rows(
        "serving/loading/folder_kind.py",
        "serving/test_loading.py",
        ("if architecture.endswith(GENERATES):", "if False:", "a language model is told apart"),
    ),
    *_rows(
        "web/openai_embeddings.py",
        "web/test_openai_embeddings.py",
        ("shorter / np.where(lengths == 0, 1, lengths)", "shorter", "cut vectors have length one"),
        ('dtype="<f4"', 'dtype=">f4"', "base64 holds little-endian numbers"),
        ("if isinstance(result, BaseException):", "if False:", "the error of an input is an error of the request"),
    ),
    *_rows(
        "serving/decisions/dry_run.py",
        "cli/test_serve.py",
        ("(trace[-1] + gap)", "trace[-1]", "a trace that is repeated keeps its gaps"),
        ("/ (gap * rate)", "", "a trace is run at the rate that is asked for"),
    ),
    *_rows(
        "cli/serve_options.py",
        "cli/test_serve.py",
        ("if not keys:", "if False:", "a key file without keys lets nobody in"),
    ),
)  # fmt: skip
