"""Sentence embeddings: a text in, a vector out. A Hugging Face encoder with the pooling that its folder says.

Reads what sentence-transformers writes (modules.json, 1_Pooling/config.json, sentence_bert_config.json); a bare
encoder is pooled by the mean of its tokens, as sentence-transformers does. No code of the folder runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.example_inputs import max_positions
from microbatch.models.hugging_face import load_encoder
from microbatch.models.json_file import json_of
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.loading.reading import Embedding, Reading
from microbatch.serving.loading.served import Given, Served
from microbatch.serving.loading.texts import PaddedRows, TextReader, cutting_tokenizer, longest_of, padding_of

SMALLEST_SUM = 1e-9
"""What a sum of weights is never divided below, as sentence-transformers has it."""

EXAMPLES = (
    "Short.",
    "A request that came alone shares its batch with others, and nobody's answer changes by it.",
    "How long does a batch take?",
    "Texts of many lengths are sorted by length first; those in one batch are padded to the longest of them, and what "
    "is padding is hidden from every layer, so that it changes nothing but the time.",
)
"""Warm the model up, give its first table of times, and are compared alone and in a batch: long and short ones."""


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=SMALLEST_SUM)


def _mean_over_root(hidden: Tensor, mask: Tensor) -> Tensor:
    return (hidden * mask).sum(1) / mask.sum(1).clamp(min=SMALLEST_SUM).sqrt()


def _maximum(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(mask == 0, float("-inf")).amax(1)


def _first(hidden: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG001 (one form for all)
    return hidden[:, 0]


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    ends = mask.sum(1, dtype=torch.long).squeeze(-1) - 1
    return hidden[torch.arange(len(hidden), device=hidden.device), ends]


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls_token": _first,
    "max_tokens": _maximum,
    "mean_tokens": _mean,
    "mean_sqrt_len_tokens": _mean_over_root,
    "lasttoken": _last,
}
"""From (rows, tokens, width) and the mask (rows, tokens, 1) to (rows, width), by the name in 1_Pooling/config.json; in
the order in which sentence-transformers joins several."""

LONG = "pooling_mode_"
_SHORT_NAMES = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens"}
"""How newer folders write them, in one member pooling_mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFolder:
    """What a folder says about its embeddings.

    Attributes:
        path: of the encoder.
        poolings: names of `POOLINGS`; the results are joined.
        normalised: vectors have length 1.
        longest: tokens of a text; None: as many as the model has positions for.
        prefix: put before each text.
        lower: texts are written small first.
    """

    path: Path
    poolings: tuple[str, ...] = ("mean_tokens",)
    normalised: bool = False
    longest: int | None = None
    prefix: str = ""
    lower: bool = False


class SentenceModel(nn.Module):
    """Rows of token ids to one vector each, whatever they are padded with."""

    def __init__(self, encoder: nn.Module, poolings: tuple[str, ...], *, normalised: bool) -> None:
        """
        Args:
            encoder: gives ``last_hidden_state`` (rows, tokens, width).
            poolings: names of `POOLINGS`.
            normalised: make vectors of length 1.
        """
        super().__init__()
        self.encoder, self.poolings, self.normalised = encoder, poolings, normalised

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(rows, tokens) ids and mask to (rows, dimensions), in float32 at least."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        vectors = torch.cat([POOLINGS[name](hidden, mask) for name in self.poolings], dim=-1)
        return normalize(vectors, dim=-1) if self.normalised else vectors


def from_sentences(text: str, name: str, given: Given) -> Served:
    """A folder as an engine that takes texts, or token ids, and answers with vectors.

    Raises:
        InvalidModel: something is missing, broken or not known.
        InvalidSettings: settings that contradict each other.
    """
    if "examples" in given:
        raise InvalidSettings(f"{text} needs no examples.", "Leave out --examples; it is for functions.")
    folder = read_sentence_folder(Path(text))
    encoder, notes = load_encoder(folder.path)
    reader = _reader(folder, encoder)
    if hasattr(encoder.config, "use_cache"):
        encoder.config.use_cache = False  # of a decoder; nobody goes on from it
    model = SentenceModel(encoder, folder.poolings, normalised=folder.normalised).eval()
    engine = DynamicBatcher(
        model, name=name, collate=PaddedRows(padding_of(encoder.config)), examples=reader(EXAMPLES), **given
    )
    facts = Embedding(encoder.config.hidden_size * len(folder.poolings), reader.longest, reader.vocabulary)
    return Served(
        name=name,
        text=text,
        kind="embeddings",
        engine=Reading(engine, reader, is_long=reader.is_long, form=reader.form, embedding=facts),
        takes=f"a text, cut at {facts.longest} tokens, or token ids; answers with {facts.dimensions} numbers",
        notes=notes,
    )


def read_sentence_folder(path: Path) -> SentenceFolder:
    """What the files of sentence-transformers say; the mean of all tokens where there are none.

    Raises:
        InvalidModel: a file is broken, or asks for what is not known here.
    """
    modules = _modules(path)
    inner = path / modules["Transformer"]
    limits = json_of(inner / "sentence_bert_config.json")
    prompts = json_of(path / "config_sentence_transformers.json")
    prefix = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name"), "")
    longest = limits.get("max_seq_length")
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise InvalidModel(f"{path} has a max_seq_length of {longest!r}.", "Write a number of tokens.")
    pooling = modules.get("Pooling")
    return SentenceFolder(
        path=inner,
        poolings=("mean_tokens",) if pooling is None else _poolings(path / pooling / "config.json"),
        normalised="Normalize" in modules,
        longest=longest,
        prefix=prefix,
        lower=bool(limits.get("do_lower_case")),
    )


def _modules(path: Path) -> dict[str, str]:
    """Folder by kind of module, as modules.json lists them."""
    file = path / "modules.json"
    if not file.is_file():
        return {"Transformer": ""}
    try:
        listed = {str(row["type"]).rpartition(".")[2]: str(row["path"]) for row in _rows_of(file)}
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidModel(f"{file} cannot be read: {error}.", "Download or write it again.") from error
    if unknown := sorted(set(listed) - {"Transformer", "Pooling", "Normalize"}):
        raise InvalidModel(f"{file} has a {unknown[0]}, which is not known here.", "Use file.py:callable.")
    if "Transformer" not in listed or "Pooling" not in listed:
        raise InvalidModel(f"{file} has no Transformer with a Pooling.", "Use file.py:callable.")
    if outside := [place for place in listed.values() if not _is_inside(path, place)]:
        raise InvalidModel(f"{file} leads out of its folder, to {outside[0]}.", "Correct it.")
    return listed


def _rows_of(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _is_inside(path: Path, place: str) -> bool:
    return (path / place).resolve().is_relative_to(path.resolve())


def _poolings(file: Path) -> tuple[str, ...]:
    settings = json_of(file)
    short = settings.get("pooling_mode")
    named = {short} if isinstance(short, str) else set(short or ())
    names = {_SHORT_NAMES.get(name, name) for name in named}
    chosen = [key for key, on in settings.items() if key.startswith(LONG) and on]
    names |= {key.removeprefix(LONG) for key in chosen}
    if unknown := sorted(names - set(POOLINGS)):
        raise InvalidModel(f"{file} asks for {unknown[0]}, which is not known here.", f"Known: {', '.join(POOLINGS)}.")
    if not names:
        raise InvalidModel(f"{file} chooses no pooling.", 'Write "pooling_mode_mean_tokens": true.')
    return tuple(name for name in POOLINGS if name in names)


def _reader(folder: SentenceFolder, encoder: Any) -> TextReader:
    longest = longest_of(folder.path, max_positions(encoder.config), folder.longest)
    tokenizer = cutting_tokenizer(folder.path, longest)
    vocabulary = encoder.get_input_embeddings().num_embeddings
    if tokenizer.get_vocab_size() > vocabulary:
        raise InvalidModel(
            f"The tokenizer of {folder.path} has {tokenizer.get_vocab_size()} tokens, the model {vocabulary}.",
            "They do not belong together.",
        )
    return TextReader(tokenizer, longest, vocabulary, folder.prefix, folder.lower)
