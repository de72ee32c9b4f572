"""What a Hugging Face folder is good for, read off its files. Loads no torch and runs nothing."""

from __future__ import annotations

from pathlib import Path

from microbatch.errors import InvalidModel
from microbatch.models.json_file import json_of

EMBEDDINGS, MODULE, LANGUAGE_MODEL = "embeddings", "module", "language-model"

ENCODERS = frozenset({
    "albert", "bert", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "flaubert",
    "modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Model types that read a text in both directions: what they give for its tokens stands for the text."""

GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining")
"""How the names of architectures end that generate text, and of those whose head an embedding does not need."""


def kind_of(folder: Path, asked: str | None = None) -> str:
    """embeddings, module or language-model; what was asked for where something was.

    Raises:
        InvalidModel: the weights are there only as a pickle, which is never opened.
    """
    _refuse_pickled(folder)
    if asked is not None:
        return asked
    if (folder / "modules.json").is_file():
        return EMBEDDINGS
    settings = json_of(folder / "config.json")
    named = settings.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if architecture.endswith(GENERATES):
        return LANGUAGE_MODEL
    reads_text = settings.get("model_type") in ENCODERS and (folder / "tokenizer.json").is_file()
    return EMBEDDINGS if reads_text and (not architecture or architecture.endswith(HEADLESS)) else MODULE


def _refuse_pickled(folder: Path) -> None:
    """Random weights would be a poor answer to somebody whose weights lie there.

    Raises:
        InvalidModel: the weights are a pickle only.
    """
    from microbatch.models.pickles import SUFFIXES

    names = [file.name for file in folder.iterdir() if file.is_file()]
    pickles = sorted(name for name in names if name.endswith(SUFFIXES) and name != "training_args.bin")
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise InvalidModel(
            f"{folder} has its weights only as a pickle ({pickles[0]}), which is never opened: it can run any code.",
            "Save them as safetensors once, where you trust the file: model.save_pretrained(folder).",
        )
