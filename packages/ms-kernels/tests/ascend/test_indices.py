"""Indices that are out of range: fused operators never get one to follow."""

import pytest
import torch

import ms_kernels
from ms_kernels import ArgumentError, use_backend
from ms_kernels.operators import CONTRACTS

FAR = [-1, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize(
    ("operator", "name", "dims", "options"),
    [
        ("cross_entropy", "targets", {}, {"reduction": "none"}),
        ("linear_cross_entropy", "targets", {"V": 128}, {"reduction": "none"}),
        ("token_log_probs", "tokens", {"V": 128}, {}),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_a_target_that_is_no_class_makes_its_own_loss_nan(operator, name, dims, options, far):
    """The other rows are as they were, and the device goes on."""
    drawn = CONTRACTS[operator].draw(dims, dtype=torch.bfloat16, device="npu")
    drawn[name][5] = far
    with use_backend("ascend"):
        got = getattr(ms_kernels, operator)(**drawn, **options).cpu()
    assert got.isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("far", FAR)
def test_a_page_that_does_not_exist_makes_its_sequence_nan_and_a_length_is_refused(far):
    """Lengths are read by the host anyway; the table is not."""
    contract = CONTRACTS["decode_attention"]
    drawn = contract.draw({}, dtype=torch.bfloat16, device="npu")
    drawn["page_table"][0, 0] = far
    with use_backend("ascend"):
        got = ms_kernels.decode_attention(**drawn).cpu()
        assert got[0].isnan().all()
        assert not got[1:].isnan().any()
        drawn["lengths"][0] = far
        with pytest.raises(ArgumentError, match=f"lengths is {far} somewhere"):
            ms_kernels.decode_attention(**drawn)
