"""Token permutation for mixtures of experts, and grouped matrix products."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]

ROWS, INNER = 0, 2
"""Dim of the left matrix that is split into groups."""


def permute(
    tokens: Tensor, indices: Tensor, rows: int, padded: bool, out: Tensor, positions: Tensor
) -> None:
    """Rows in the order of their experts, and the row index of each choice."""
    flat = indices.reshape(-1)
    if padded or rows != flat.numel():
        raise ValueError("padding and dropped tokens are not implemented")
    order = flat.argsort(stable=True)
    out.copy_(tokens[order // (flat.numel() // max(tokens.shape[0], 1))])
    positions.copy_(order.argsort())


def permute_grad(grad: Tensor, positions: Tensor, choices: int, padded: bool, out: Tensor) -> None:
    """The gradient of `permute`: the sum over each token's choices."""
    out.copy_(grad.float()[positions.long()].view(-1, choices, grad.shape[-1]).sum(1))


def unpermute(
    rows: Tensor,
    positions: Tensor,
    router_weights: Tensor | None,
    padded: bool,
    shape: list[int] | None,
    out: Tensor,
) -> None:
    """Sum over each token's choices, times the router weights; one choice without weights."""
    choices = 1 if router_weights is None else router_weights.shape[-1]
    selected = rows.float()[positions.long()].view(-1, choices, rows.shape[-1])
    out.copy_(
        (selected if router_weights is None else selected * router_weights.float()[..., None]).sum(
            1
        )
    )


def unpermute_grad(
    rows: Tensor | None,
    grad: Tensor,
    positions: Tensor,
    router_weights: Tensor | None,
    padded: bool,
    shape: list[int] | None,
    drows: Tensor,
    dweights: Tensor | None,
) -> None:
    """The gradient of `unpermute`."""
    choices = 1 if router_weights is None else router_weights.shape[-1]
    grads = grad.float()[:, None].expand(-1, choices, -1)
    weighted = grads if router_weights is None else grads * router_weights.float()[..., None]
    row_grads = torch.zeros(drows.shape)
    row_grads[positions.long()] = weighted.reshape(-1, grad.shape[-1])
    drows.copy_(row_grads)
    if router_weights is not None and dweights is not None and rows is not None:
        selected = rows.float()[positions.long()].view(-1, choices, rows.shape[-1])
        dweights.copy_((selected * grads).sum(-1))


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    offset: list[Tensor] | None,
    antiquant_scale: list[Tensor] | None,
    antiquant_offset: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    groups: Tensor | None,
    activation_input: list[Tensor] | None,
    activation_scale: list[Tensor] | None,
    activation_offset: list[Tensor] | None,
    split_item: int,
    group_type: int,
    group_list_type: int,
    activation: int,
    out: list[Tensor],
    activated: list[Tensor] | None,
    token_scales: list[Tensor] | None,
) -> None:
    """One product per group of rows or per group of the inner dim, all in one result."""
    unsupported = (bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale)
    if (
        any(tensors is not None and any(t.numel() for t in tensors) for tensors in unsupported)
        or activation
    ):
        raise ValueError("biases, scales and activations are not implemented")
    if len(x) != 1 or len(weight) != 1 or groups is None or split_item not in (2, 3):
        raise ValueError("only one left matrix, one weight stack and one result are implemented")
    sizes = groups if group_list_type else groups.diff(prepend=groups.new_zeros(1))
    if group_list_type and len(groups) == 1:
        raise ValueError("CANN refuses a list with a single count; pass its cumulative sum")
    left, right = x[0].float(), weight[0].float()
    group_sizes = sizes.tolist()
    if group_type == ROWS:
        parts = zip(torch.split(left, group_sizes), right, strict=True)
        out[0].copy_(torch.cat([piece @ matrix for piece, matrix in parts]))
    elif group_type == INNER:
        pairs = zip(torch.split(left, group_sizes, 1), torch.split(right, group_sizes), strict=True)
        out[0].copy_(torch.stack([piece @ right_piece for piece, right_piece in pairs]))
    else:
        raise ValueError(f"group_type {group_type} is not implemented")


def grouped_matmul_v5(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    offset: list[Tensor] | None,
    antiquant_scale: list[Tensor] | None,
    antiquant_offset: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    groups: Tensor | None,
    activation_input: list[Tensor] | None,
    activation_scale: list[Tensor] | None,
    activation_offset: list[Tensor] | None,
    split_item: int,
    group_type: int,
    group_list_type: int,
    activation: int,
    tuning: list[int] | None,
    out: list[Tensor],
    activated: list[Tensor] | None,
    token_scales: list[Tensor] | None,
) -> None:
    """The same; `tuning` hints at the expected sizes."""
    quantized = (bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale)
    activating = (activation_input, activation_scale, activation_offset)
    modes = (split_item, group_type, group_list_type, activation)
    grouped_matmul(x, weight, *quantized, groups, *activating, *modes, out, activated, token_scales)


BODIES: dict[str, Callable[..., None]] = {
    "aclnnGroupedMatmulV4": grouped_matmul,
    "aclnnGroupedMatmulV5": grouped_matmul_v5,
    "aclnnMoeTokenPermute": permute,
    "aclnnMoeTokenPermuteGrad": permute_grad,
    "aclnnMoeTokenUnpermute": unpermute,
    "aclnnMoeTokenUnpermuteGrad": unpermute_grad,
}
