"""Pieces of weights: what is stacked, fused or turned on disk reads and writes alike."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ms_parallel.models.weight_names import (
    WeightRules,
    WeightSlice,
    renamed,
    rows_of,
    slices_of,
    stacked,
)

RULES: WeightRules = {
    "layers.*.gate.weight": renamed("blocks.{0}.router.weight"),
    "layers.*.q.weight": rows_of("layers.{0}.qkv.weight", 0, 10),
    "layers.*.k.weight": rows_of("layers.{0}.qkv.weight", 6, 10),
    "layers.*.up.weight": stacked("layers.{0}.experts.{expert}.{matrix}.weight", "w1", "w3"),
    "layers.*.down.weight": stacked("layers.{0}.experts.{expert}.{matrix}.weight", "w2"),
    "layers.*.turned.weight": lambda stars, shape: iter(
        WeightSlice(
            tensor=f"layers.{stars[0]}.turned",
            shape=(shape[0], shape[3], 2 * shape[2]),
            part=(slice(0, shape[0]), slice(0, shape[3]), slice(half, 2 * shape[2], 2)),
            box=(slice(0, shape[0]), slice(half, half + 1), slice(0, shape[2]), slice(0, shape[3])),
            dims=(0, None, 2, 1),
        )
        for half in range(2)
    ),
}
SHAPES = {
    "layers.7.gate.weight": (3, 4),
    "layers.7.q.weight": (6, 4),
    "layers.7.k.weight": (4, 4),
    "layers.7.up.weight": (3, 2, 5, 4),
    "layers.7.down.weight": (3, 4, 5),
    "layers.7.turned.weight": (3, 2, 5, 4),
    "layers.7.norm.weight": (4,),
}


def to_folder(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder; what no piece fills is NaN."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for piece in slices_of(RULES, name, weight.shape):
            whole = tensors.setdefault(piece.tensor, torch.full(piece.shape, torch.nan))
            whole[piece.part] = piece.to_tensor(weight[piece.box])
    return tensors


WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    for name, shape in SHAPES.items()
}
TENSORS = to_folder(WEIGHTS)


def test_each_expert_is_a_tensor_and_each_fused_tensor_is_whole() -> None:
    """Names, values and orientation are those that the rules say."""
    names = [f"layers.7.experts.{e}.{m}.weight" for e, m in product(range(3), ("w1", "w2", "w3"))]
    others = (
        "blocks.7.router.weight",
        "layers.7.qkv.weight",
        "layers.7.turned",
        "layers.7.norm.weight",
    )
    assert sorted(TENSORS) == sorted([*names, *others])
    assert not any(tensor.isnan().any() for tensor in TENSORS.values())
    up, turned = WEIGHTS["layers.7.up.weight"], WEIGHTS["layers.7.turned.weight"]
    assert torch.equal(TENSORS["layers.7.experts.2.w3.weight"], up[2, 1])
    assert torch.equal(TENSORS["layers.7.turned"][..., 1::2], turned[:, 1].mT)
    qkv = torch.cat((WEIGHTS["layers.7.q.weight"], WEIGHTS["layers.7.k.weight"]))
    assert torch.equal(TENSORS["layers.7.qkv.weight"], qkv)


@pytest.mark.parametrize("name", SHAPES)
@settings(deadline=None)
@given(data=st.data())
def test_any_box_of_a_weight_is_read_from_its_parts_alone(name: str, data: st.DataObject) -> None:
    """Whatever box a process holds, pieces give its values, and read nothing that is not in it."""
    cuts = [
        sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        for size in SHAPES[name]
    ]
    box = tuple(slice(start, stop) for start, stop in cuts)
    found = torch.full([dim.stop - dim.start for dim in box], torch.nan)
    read = 0
    for piece in slices_of(RULES, name, SHAPES[name]):
        inside = piece.within(box)
        if inside is not None:
            part, place = inside
            found[place] = piece.to_parameter(TENSORS[piece.tensor][part])
            read += TENSORS[piece.tensor][part].numel()
    assert torch.equal(found, WEIGHTS[name][box])
    assert read == found.numel()


def test_a_weight_of_one_number_is_read() -> None:
    """As activations that are learnt have."""
    (piece,) = slices_of({}, "model.alpha", ())
    assert piece.to_parameter(torch.tensor(2.0)) == 2
    assert piece.to_tensor(torch.tensor(2.0)) == 2
