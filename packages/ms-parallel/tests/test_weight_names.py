"""Weight slices: stacked, fused or transposed tensors on disk can be read and written."""

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
    """Tensors of a folder; elements that no slice fills are NaN."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for piece in slices_of(RULES, name, weight.shape):
            tensor = tensors.setdefault(piece.tensor, torch.full(piece.shape, torch.nan))
            tensor[piece.part] = piece.to_tensor(weight[piece.box])
    return tensors


WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    for name, shape in SHAPES.items()
}
TENSORS = to_folder(WEIGHTS)


def test_experts_are_separate_tensors_and_fused_tensors_are_complete() -> None:
    """Names, values and orientation follow the rules."""
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
def test_any_box_of_a_weight_reads_only_its_slices(name: str, data: st.DataObject) -> None:
    """For any box of a process, slices give its values and read nothing else."""
    cuts = [
        sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        for size in SHAPES[name]
    ]
    box = tuple(slice(start, stop) for start, stop in cuts)
    values = torch.full([dim.stop - dim.start for dim in box], torch.nan)
    numel = 0
    for piece in slices_of(RULES, name, SHAPES[name]):
        inside = piece.within(box)
        if inside is not None:
            part, target = inside
            values[target] = piece.to_parameter(TENSORS[piece.tensor][part])
            numel += TENSORS[piece.tensor][part].numel()
    assert torch.equal(values, WEIGHTS[name][box])
    assert numel == values.numel()


def test_a_scalar_weight_is_read() -> None:
    """For example of a learned activation."""
    (piece,) = slices_of({}, "model.alpha", ())
    assert piece.to_parameter(torch.tensor(2.0)) == 2
    assert piece.to_tensor(torch.tensor(2.0)) == 2
