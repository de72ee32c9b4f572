"""torch.export archives: what runs at which batch, and that nothing else of a file ever runs."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from microbatch.errors import InvalidModel, InvalidSettings
from microbatch.models.load import load_model
from tests.models.test_folder import Trap

Document = dict[str, Any]


class TwoInputs(nn.Module):
    """Batch first in one input and second in the other; a buffer, a constant, sizes computed from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(8, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        z = torch.relu(self.linear(x))
        y, _ = self.attention(z, z, z)
        return {"y": (y + self.shift) * scale.t()[..., None], "rows": y.reshape(y.shape[0] * y.shape[1], -1)}


def export(path: Path, model: nn.Module, args: Any, kwargs: Any = None, **more: Any) -> str:
    torch.export.save(torch.export.export(model.eval(), args, kwargs, **more), path)
    return str(path)


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> str:
    batch = Dim("batch")
    path = tmp_path_factory.mktemp("archives") / "free.pt2"
    return export(path, nn.Linear(4, 3), (torch.randn(2, 4),), dynamic_shapes=({0: batch},))


def test_an_archive_with_a_free_batch_runs_at_any(free: str) -> None:
    loaded = load_model(free)
    assert loaded.example_at is not None and loaded.modes == ("inference",) and loaded.notes == ()
    for batch in (1, 2, 5, 64):
        args, _ = loaded.example_at(batch, None)
        assert loaded.model(*args).shape == (batch, 3)
    loaded.model.eval()  # torch itself refuses this on an exported graph


def test_the_batch_is_found_in_any_dimension_and_within_its_range(tmp_path: Path) -> None:
    batch = Dim("batch", min=4, max=32)
    model, x, scale = TwoInputs().eval(), torch.randn(4, 5, 8), torch.randn(5, 4)
    shapes = {"x": {0: batch}, "scale": {1: batch}}
    path = export(tmp_path / "two.pt2", model, (x,), {"scale": scale}, dynamic_shapes=shapes)
    loaded = load_model(path)
    assert loaded.example_at is not None
    args, kwargs = loaded.example_at(7, None)
    assert isinstance(args[0], Tensor) and args[0].shape == (7, 5, 8)
    assert isinstance(kwargs["scale"], Tensor) and kwargs["scale"].shape == (5, 7)
    found, expected = loaded.model(*args, **kwargs), model(*args, **kwargs)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "batches of 4 to 32" in loaded.notes[0]
    for outside in (3, 33):
        with pytest.raises(InvalidSettings, match=f"batches of 4 to 32, not for {outside}"):
            loaded.example_at(outside, None)


def test_a_fixed_batch_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = export(tmp_path / "fixed.pt2", nn.Linear(4, 3), (torch.randn(6, 4),))
    with pytest.raises(InvalidModel, match=r"fixed batch \(inputs of \(6, 4\)\).*dynamic_shapes"):
        load_model(path)


def test_the_dtype_stays(free: str) -> None:
    assert load_model(free, dtype="fp32").args[0].dtype == torch.float32  # type: ignore[attr-defined]
    with pytest.raises(InvalidSettings, match="exported in float32"):
        load_model(free, dtype="bf16")


def test_outputs_of_transformers_are_known(tmp_path: Path) -> None:
    from microbatch.models.hugging_face import import_transformers

    transformers = import_transformers("the test")
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    tokens, batch = torch.ones(2, 6, dtype=torch.long), Dim("batch")
    shapes = {"input_ids": {0: batch}}
    model = transformers.BertModel(config)
    path = export(tmp_path / "bert.pt2", model, (), {"input_ids": tokens}, dynamic_shapes=shapes, strict=False)
    loaded = load_model(path)
    assert loaded.model(**loaded.kwargs).last_hidden_state.shape == (2, 6, 16)


def rewritten(source: str, target: Path, name: str, change: Callable[[bytes], bytes]) -> str:
    """A copy of an archive with one of its files changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for entry in old.namelist():
            data = old.read(entry)
            new.writestr(entry, change(data) if entry.endswith(name) else data)
    return str(target)


def edited(edit: Callable[[Document], object]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        document = json.loads(data)
        edit(document)
        return json.dumps(document).encode()

    return change


def node(document: Document) -> Document:
    found: Document = document["graph_module"]["graph"]["nodes"][-1]
    return found


def spec(document: Document) -> Document:
    found: Document = document["graph_module"]["module_call_graph"][0]["signature"]
    return found


def with_import(document: Document) -> None:
    context = json.dumps({"__enum__": True, "fqn": "trap:Kind", "name": "A"})
    leaf: Document = {"type": None, "context": None, "children_spec": []}
    spec(document)["out_spec"] = json.dumps([1, {"type": "builtins.dict", "context": context, "children_spec": [leaf]}])


def with_expression(document: Document) -> None:
    sizes = document["graph_module"]["graph"]["tensor_values"]["input"]["sizes"]
    sizes[0]["as_expr"]["expr_str"] = "__import__('pathlib').Path('ran').touch()"


TRAPS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a target that calls the system": (
        "models/model.json",
        edited(lambda document: node(document).update(target="torch.os.system")),
        "an operator that is none of torch's",
    ),
    "a target that reads files": (
        "models/model.json",
        edited(lambda document: node(document).update(target="torch.ops.aten.from_file.default")),
        "an operator that is none of torch's",
    ),
    "an expression that is code": ("models/model.json", edited(with_expression), "a size that is none of torch's"),
    "a structure that imports": ("models/model.json", edited(with_import), "an output that is none of torch's"),
    "a structure of an unknown type": (
        "models/model.json",
        edited(lambda document: spec(document).update(out_spec='[1, {"type": "trap.Kind", "context": "null"}]')),
        "an output that is none of torch's",
    ),
    "a name that is code": (
        "models/model.json",
        edited(lambda document: node(document).update(name="x=open('ran','w')")),
        "a name that is none of torch's",
    ),
    "a weight as a pickle": (
        "weights_config.json",
        edited(lambda document: next(iter(document["config"].values())).update(use_pickle=True)),
        "a pickled tensor",
    ),
    "a constant as an object": (
        "weights_config.json",
        edited(lambda document: next(iter(document["config"].values())).update(path_name="opaque_obj_0")),
        "a pickled tensor or object",
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_an_archive_that_would_run_code_is_refused(
    free: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    file, change, words = TRAPS[name]
    path = rewritten(free, tmp_path / "evil.pt2", file, change)
    with pytest.raises(InvalidModel) as caught:
        load_model(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_pickled_example_inputs_stay_closed(free: str, tmp_path: Path) -> None:
    evil = pickle.dumps(Trap(tmp_path / "ran"))
    path = rewritten(free, tmp_path / "evil.pt2", "sample_inputs/model.pt", lambda _: evil)
    with pytest.raises(InvalidModel, match="a pickle of more than tensors"):
        load_model(path)
    assert not (tmp_path / "ran").exists()


def test_compiled_code_is_refused(free: str, tmp_path: Path) -> None:
    path = rewritten(free, tmp_path / "compiled.pt2", "nothing", lambda data: data)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("compiled/data/aotinductor/model/model.so", b"\x7fELF")
    with pytest.raises(InvalidModel, match="compiled code"):
        load_model(path)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_cut_off_archive_is_one_clear_line(free: str, tmp_path: Path, share: float) -> None:
    data = Path(free).read_bytes()
    (tmp_path / "cut.pt2").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(InvalidModel, match=r"no whole torch\.export archive"):
        load_model(str(tmp_path / "cut.pt2"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"{", "no whole torch.export archive"),
        (lambda data: data.replace(b"torch.ops.aten.linear.default", b"torch.ops.aten.linear.nothing"), "opened"),
        (lambda data: data.replace(b'"weight"', b'"nothing"'), "opened"),
    ],
)
def test_a_broken_graph_is_one_clear_line(free: str, tmp_path: Path, change: Any, words: str) -> None:
    path = rewritten(free, tmp_path / "broken.pt2", "models/model.json", change)
    with pytest.raises(InvalidModel) as caught:
        load_model(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
