"""A deep model run through one block of each kind, and left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from microbatch.models.first_of_kind import first_of_each_kind


class Block(nn.Module):
    def __init__(self, width: int, layer_idx: int, *, sliding: bool = False) -> None:
        super().__init__()
        self.layer_idx, self.sliding = layer_idx, sliding
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class Deep(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
            self.runs += 1
        return x


def test_equal_blocks_run_once_and_come_back() -> None:
    model = Deep([Block(8, i) for i in range(6)])
    blocks = list(model.layers)
    with first_of_each_kind(model, 6) as stands_for:
        model(torch.zeros(1, 8))
    assert stands_for == (0,) * 6
    assert model.runs == 1
    assert [id(block) for block in model.layers] == [id(block) for block in blocks]


def test_each_kind_stands_for_its_own() -> None:
    model = Deep([Block(8, i, sliding=i % 3 != 0) for i in range(6)])
    with first_of_each_kind(model, 6) as stands_for:
        model(torch.zeros(1, 8))
    assert stands_for == (0, 1, 1, 0, 1, 1)
    assert model.runs == 2


def test_another_shape_is_another_kind() -> None:
    blocks = [Block(8, 0), Block(8, 1), Block(8, 2)]
    blocks[2].linear = nn.Linear(8, 8, bias=False)
    with first_of_each_kind(Deep(blocks), 3) as stands_for:
        assert stands_for == (0, 0, 2)


@pytest.mark.parametrize("count", [5, 7])
def test_without_such_a_list_the_model_stays_whole(count: int) -> None:
    model = Deep([Block(8, i) for i in range(6)])
    with first_of_each_kind(model, count) as stands_for:
        model(torch.zeros(1, 8))
    assert stands_for is None
    assert model.runs == 6


def test_blocks_come_back_after_a_failure() -> None:
    model = Deep([Block(8, i) for i in range(3)])
    with pytest.raises(ValueError, match="inside"), first_of_each_kind(model, 3):
        raise ValueError("inside")
    assert len(model.layers) == 3
