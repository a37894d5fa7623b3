"""Full gradients of a step under a layout, and their differences from one process's."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ms_parallel.cluster.layout import AXES, Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.proof.batches import local_rows
from ms_parallel.proof.records import Counterexample
from ms_parallel.split.part import wrap_like


def full_gradients(engine: Engine, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Compute the loss of a global batch and the gradient of each weight of this process's stages.

    Gradients are gathered to full tensors; a tied copy uses its owner's name. The weights do not
    change. Collective.
    """
    loss = NextTokenLoss()
    rows = engine.runner.microbatches(local_rows(batch, engine.groups))
    counts = engine.reduction.count(rows, loss)
    weight, tokens = counts.weight, counts.tokens
    with engine.balancer.count_tokens(tokens):
        results = engine.runner.forward_backward(rows, loss, weight, engine.reduction)
    engine.balancer.reduce()
    loss_sum = torch.zeros((), device=engine.device)
    if results and engine.groups.place.is_loss_rank:
        loss_sum += torch.stack([result.loss for result in results]).sum()
    owners = {copy: owner for owner, copy in engine.plan.tied}
    gradients = {}
    for name, gradient in engine.reduction.gradients().items():
        full = wrap_like(engine.parameters[name], gradient)
        if isinstance(full, DTensor):
            full = full.full_tensor()
        gradients[owners.get(name, name)] = full.detach().clone()
    engine.trained.zero_grad()
    return float(engine.groups.all_reduce(loss_sum)), gradients


def compare(
    gradients: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    layout: Layout,
    microbatches: int,
) -> tuple[float, list[Counterexample]]:
    """Return the largest difference, and a counterexample for each one above the tolerance.

    Args:
        gradients: gradients under a layout, by weight.
        expected: gradients of one process.
        tolerance: allowed difference relative to the largest value of a gradient.
        layout: layout whose axis sizes may explain a constant ratio.
        microbatches: number of microbatches of this process.
    """
    largest, counterexamples = 0.0, []
    for name, gradient in gradients.items():
        reference = expected[name]
        scale = float(reference.abs().max()) or 1.0
        difference = float((gradient - reference).abs().max()) / scale
        largest = max(largest, difference)
        if not difference <= tolerance:  # also true for NaN
            ratio = _ratio(gradient, reference, layout, microbatches)
            deviation = (
                f"is {ratio} of one process's"
                if ratio
                else f"differs from one process's by {difference:.1e}"
            )
            layer = re.search(r"\.(\d+)\.", name)
            counterexamples.append(
                Counterexample(
                    check="gradients",
                    what=f"the gradient of {name!r} {deviation}",
                    parameter=name,
                    layer=int(layer[1]) if layer else None,
                    ratio=ratio,
                    apart=difference,
                )
            )
    return largest, counterexamples


def _ratio(gradient: Tensor, reference: Tensor, layout: Layout, microbatches: int) -> str:
    """Explain a constant ratio `gradient` / `reference` by an axis size; "" if it varies."""
    square = float((reference * reference).sum())
    if square == 0.0:
        return ""
    # Least squares; the ratio is constant if the residual is only rounding in float64.
    ratio = float((gradient * reference).sum()) / square
    if not float((gradient - ratio * reference).abs().max()) <= 1e-9 * float(reference.abs().max()):
        return ""
    sizes = {axis: getattr(layout, axis) for axis in (*AXES, "expert")}
    sizes["microbatches"] = microbatches
    for name, size in sizes.items():
        if size > 1 and abs(ratio - 1 / size) < 1e-9:
            return f"1/{name}"
        if size > 1 and abs(ratio - size) < 1e-9:
            return name
    return f"{ratio:.6g}"
