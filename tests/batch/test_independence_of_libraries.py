"""Real architectures, small: those of transformers by their config, and ResNet as torchvision has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from microbatch.batch.different_rows import example_batch
from microbatch.batch.exactness import ExactnessReport
from microbatch.batch.independence import check_independence
from microbatch.models.load import load_model
from microbatch.models.modes import in_mode

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
CONFIGS = {
    "bert": SMALL | {"architectures": ["BertForMaskedLM"], "max_position_embeddings": 32},
    "llama": SMALL | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, "max_position_embeddings": 32},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50,
             "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2},
    "mixtral": SMALL | {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 1, "num_local_experts": 4,
                        "max_position_embeddings": 32},
}  # fmt: skip


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_language_models_are_exact_with_padded_rows(name: str, mode: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | {"model_type": name}))
    report = checked(str(tmp_path), mode, sequence=8)
    assert report.exact, report.culprits
    assert report.largest_difference is not None and report.largest_difference < (1e-5 if name == "mixtral" else 1e-13)
    assert not any("Padding was not checked" in note for note in report.notes)


@pytest.mark.filterwarnings("ignore")
def test_resnet_names_its_first_batch_norm() -> None:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    loaded = load_model("torchvision:resnet18", weights="random")
    report = check_independence(loaded.model, torch.randn(4, 3, 32, 32))
    assert report.culprits[0].module == "bn1"
    assert {culprit.kind for culprit in report.culprits} == {"batch_norm"}
    assert len(report.culprits) == 20
    assert check_independence(loaded.model, torch.randn(3, 3, 32, 32), mode="inference").exact


def checked(model: str, mode: str, sequence: int | None = None) -> ExactnessReport:
    torch.manual_seed(0)
    loaded = in_mode(load_model(model), mode, sequence)
    args, kwargs = example_batch(loaded)
    assert not args and "attention_mask" in kwargs
    return check_independence(loaded.model, kwargs, mode=mode)
