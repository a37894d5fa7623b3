"""Tokens to the rows of their experts and back, and a matrix product for each expert."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BODIES"]

ROWS, INNER = 0, 2
"""Which dim of the left matrix is cut into groups."""


def permute(
    tokens: Tensor, indices: Tensor, rows: int, padded: bool, out: Tensor, places: Tensor
) -> None:
    """Rows in the order of their experts, and the row of each choice."""
    flat = indices.reshape(-1)
    if padded or rows != flat.numel():
        raise ValueError("padding and dropped tokens have no body here")
    order = flat.argsort(stable=True)
    out.copy_(tokens[order // (flat.numel() // max(tokens.shape[0], 1))])
    places.copy_(order.argsort())


def permute_grad(grad: Tensor, places: Tensor, choices: int, padded: bool, out: Tensor) -> None:
    """The gradient of `permute`: each token's sum over its choices."""
    out.copy_(grad.float()[places.long()].view(-1, choices, grad.shape[-1]).sum(1))


def unpermute(
    rows: Tensor,
    places: Tensor,
    shares: Tensor | None,
    padded: bool,
    shape: list[int] | None,
    out: Tensor,
) -> None:
    """Each token's sum over its choices, times their shares; one choice if there are none."""
    choices = 1 if shares is None else shares.shape[-1]
    chosen = rows.float()[places.long()].view(-1, choices, rows.shape[-1])
    out.copy_((chosen if shares is None else chosen * shares.float()[..., None]).sum(1))


def unpermute_grad(
    rows: Tensor | None,
    grad: Tensor,
    places: Tensor,
    shares: Tensor | None,
    padded: bool,
    shape: list[int] | None,
    to_rows: Tensor,
    to_shares: Tensor | None,
) -> None:
    """The gradient of `unpermute`."""
    choices = 1 if shares is None else shares.shape[-1]
    slopes = grad.float()[:, None].expand(-1, choices, -1)
    weighted = slopes if shares is None else slopes * shares.float()[..., None]
    found = torch.zeros(to_rows.shape)
    found[places.long()] = weighted.reshape(-1, grad.shape[-1])
    to_rows.copy_(found)
    if shares is not None and to_shares is not None and rows is not None:
        chosen = rows.float()[places.long()].view(-1, choices, rows.shape[-1])
        to_shares.copy_((chosen * slopes).sum(-1))


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
    """One product a group of rows, or a group of the inner dim; all in one result."""
    odd = (bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale)
    if any(each is not None and any(one.numel() for one in each) for each in odd) or activation:
        raise ValueError("biases, scales and activations have no body here")
    if len(x) != 1 or len(weight) != 1 or groups is None or split_item not in (2, 3):
        raise ValueError("only one left matrix, one stack of weights and one result have a body")
    sizes = groups if group_list_type else groups.diff(prepend=groups.new_zeros(1))
    if group_list_type and len(groups) == 1:
        raise ValueError("a list of one count is refused by CANN; give its running sum")
    left, right = x[0].float(), weight[0].float()
    cuts = sizes.tolist()
    if group_type == ROWS:
        parts = zip(torch.split(left, cuts), right, strict=True)
        out[0].copy_(torch.cat([part @ matrix for part, matrix in parts]))
    elif group_type == INNER:
        pairs = zip(torch.split(left, cuts, 1), torch.split(right, cuts), strict=True)
        out[0].copy_(torch.stack([part @ other for part, other in pairs]))
    else:
        raise ValueError(f"group_type {group_type} has no body here")


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
    """The same; `tuning` hints at the sizes to expect."""
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
