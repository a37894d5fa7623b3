"""The whole gradients of one update, and how they differ from one process's."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ms_parallel.cluster.layout import AXES, Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.proof.batches import my_rows
from ms_parallel.proof.records import Counterexample
from ms_parallel.split.part import laid_out_like


def whole_gradients(engine: Engine, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Compute a global batch's loss and its gradient in each weight of this process's stages.

    A tied copy goes under its owner's name. Weights stay as they are; every process calls it.
    """
    loss = NextTokenLoss()
    rows = engine.runner.microbatches(my_rows(batch, engine.groups))
    counts = engine.reduction.count(rows, loss)
    weight, tokens = counts.weight, counts.tokens
    with engine.balancer.count_tokens(tokens):
        results = engine.runner.forward_backward(rows, loss, weight, engine.reduction)
    engine.balancer.expert_load(tokens)
    total = torch.zeros((), device=engine.device)
    if results and engine.groups.place.speaks_for_rows:
        total += torch.stack([result.loss for result in results]).sum()
    owners = {copy: owner for owner, copy in engine.plan.tied}
    found = {}
    for name, gradient in engine.reduction.gradients().items():
        whole = laid_out_like(engine.parameters[name], gradient)
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        found[owners.get(name, name)] = whole.detach().clone()
    engine.trained.zero_grad()
    return float(engine.groups.all_reduce(total)), found


def compare(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    layout: Layout,
    microbatches: int,
) -> tuple[float, list[Counterexample]]:
    """Find the largest difference, and the gradients further apart than the tolerance.

    Args:
        found: gradients under a layout.
        expected: those of one process.
        tolerance: allowed difference, as a share of a gradient's largest value.
        layout: whose sizes explain a ratio.
        microbatches: that this process had.
    """
    most, wrong = 0.0, []
    for name, gradient in found.items():
        right = expected[name]
        scale = float(right.abs().max()) or 1.0
        apart = float((gradient - right).abs().max()) / scale
        most = max(most, apart)
        if not apart <= tolerance:  # NaN too
            ratio = _ratio(gradient, right, layout, microbatches)
            shown = f"is {ratio} of one process's" if ratio else f"is {apart:.1e} off one process's"
            layer = re.search(r"\.(\d+)\.", name)
            wrong.append(
                Counterexample(
                    check="gradients",
                    what=f"the gradient of {name!r} {shown}",
                    parameter=name,
                    layer=int(layer[1]) if layer else None,
                    ratio=ratio,
                    apart=apart,
                )
            )
    return most, wrong


def _ratio(found: Tensor, right: Tensor, layout: Layout, microbatches: int) -> str:
    """Name the one factor from `right` to `found` in the layout's words; empty if there is none."""
    square = float((right * right).sum())
    if square == 0.0:
        return ""
    ratio = float((found * right).sum()) / square
    if not float((found - ratio * right).abs().max()) <= 1e-9 * float(right.abs().max()):
        return ""
    sizes = {axis: getattr(layout, axis) for axis in (*AXES, "expert")}
    sizes["microbatches"] = microbatches
    for name, size in sizes.items():
        if size > 1 and abs(ratio - 1 / size) < 1e-9:
            return f"1/{name}"
        if size > 1 and abs(ratio - size) < 1e-9:
            return name
    return f"{ratio:.6g}"
