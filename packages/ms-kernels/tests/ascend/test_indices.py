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


@pytest.mark.parametrize("far", FAR)
def test_a_choice_that_is_no_expert_comes_last_and_is_counted_for_none(far):
    """The others stand as if it were the choice of one more expert."""
    drawn = CONTRACTS["permute_tokens"].draw({}, dtype=torch.bfloat16, device="npu")
    x, experts = drawn["x"], drawn["experts"]
    experts[5, 1] = far
    truth = experts.cpu().clone()
    truth[5, 1] = 4
    with use_backend("ascend"):
        rows, counts, places = ms_kernels.permute_tokens(x, experts, count=4)
    wanted = ms_kernels.permute_tokens(x.cpu(), truth, count=5)
    assert torch.equal(rows.cpu(), wanted[0])
    assert counts.tolist() == wanted[1][:4].tolist()
    assert torch.equal(places.cpu(), wanted[2])
    assert places[5, 1].item() == len(rows) - 1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("far", FAR)
def test_a_place_that_is_no_row_makes_its_token_nan(far, weighted):
    """The other tokens are as they were, forward and in the gradient of their rows."""
    drawn = CONTRACTS["unpermute_tokens"].draw({}, dtype=torch.float32, device="npu")
    rows, places = drawn["rows"].requires_grad_(), drawn["places"]
    weights = drawn["weights"] if weighted else None
    with use_backend("ascend"):
        sound = ms_kernels.unpermute_tokens(rows, places, weights).detach().cpu()
        places[5, 1] = far
        got = ms_kernels.unpermute_tokens(rows, places, weights)
        got.sum().backward()
    there = got.detach().cpu()
    assert there[5].isnan().all()
    kept = torch.arange(len(there)) != 5
    assert torch.equal(there[kept], sound[kept])
    assert rows.grad.shape == rows.shape


@pytest.mark.parametrize(
    "counts", [[20, 30, 0, 40], [20, 30, 0, 60], [-1, 97, 0, 0], [0, 0, 0, 0], [2**31 - 1] * 4]
)
def test_counts_that_are_not_the_rows_make_the_last_row_nan_and_lead_nowhere(counts):
    """Whether they are too few, too many or below 0; rows of sound counts before them are right."""
    drawn = CONTRACTS["grouped_matmul"].draw({}, dtype=torch.float32, device="npu")
    x, weights = drawn["x"].requires_grad_(), drawn["weights"].requires_grad_()
    given = torch.tensor(counts, dtype=drawn["counts"].dtype, device="npu")
    with use_backend("ascend"):
        got = ms_kernels.grouped_matmul(x, weights, given)
    got.sum().backward()
    assert got[-1].isnan().all()
    assert not got[:-1].isnan().any()
    first = counts[0] if 0 < counts[0] < len(x) else 0
    torch.testing.assert_close(got[:first].cpu(), x[:first].cpu() @ weights[0].cpu())
    assert not x.grad.isnan().any()
    assert weights.grad.shape == weights.shape


@pytest.mark.parametrize("experts", [1, 4])
def test_counts_of_the_rows_make_no_row_nan(experts):
    """A single expert takes the same road."""
    drawn = CONTRACTS["grouped_matmul"].draw({"E": experts}, dtype=torch.float32, device="npu")
    with use_backend("ascend"):
        got = ms_kernels.grouped_matmul(**drawn)
    wanted = ms_kernels.grouped_matmul(*(each.cpu() for each in drawn.values()))
    torch.testing.assert_close(got.cpu(), wanted)
