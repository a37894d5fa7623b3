"""Out-of-range indices are replaced before they reach a fused operator."""

import pytest
import torch

import ms_kernels
from ms_kernels import ArgumentError, use_backend
from ms_kernels.operators import CONTRACTS

OUT_OF_RANGE = [-1, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("target", OUT_OF_RANGE)
@pytest.mark.parametrize(
    ("operator", "name", "dims", "options"),
    [
        ("cross_entropy", "targets", {}, {"reduction": "none"}),
        ("linear_cross_entropy", "targets", {"V": 128}, {"reduction": "none"}),
        ("token_log_probs", "tokens", {"V": 128}, {}),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_an_out_of_range_target_gives_nan_for_its_own_loss(operator, name, dims, options, target):
    """The other rows are unchanged, and the device keeps working."""
    example = CONTRACTS[operator].draw(dims, dtype=torch.bfloat16, device="npu")
    example[name][5] = target
    with use_backend("ascend"):
        result = getattr(ms_kernels, operator)(**example, **options).cpu()
    assert result.isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("value", OUT_OF_RANGE)
def test_an_out_of_range_page_gives_nan_and_an_out_of_range_length_is_refused(value):
    """The host reads lengths anyway, but not the page table."""
    contract = CONTRACTS["decode_attention"]
    example = contract.draw({}, dtype=torch.bfloat16, device="npu")
    example["page_table"][0, 0] = value
    with use_backend("ascend"):
        result = ms_kernels.decode_attention(**example).cpu()
        assert result[0].isnan().all()
        assert not result[1:].isnan().any()
        example["lengths"][0] = value
        with pytest.raises(ArgumentError, match=rf"lengths is out of range \({value}\)"):
            ms_kernels.decode_attention(**example)


@pytest.mark.parametrize("expert", OUT_OF_RANGE)
def test_out_of_range_experts_sort_last_and_are_not_counted(expert):
    """The other choices are ordered as if it were an additional expert."""
    example = CONTRACTS["permute_tokens"].draw({}, dtype=torch.bfloat16, device="npu")
    x, experts = example["x"], example["experts"]
    experts[5, 1] = expert
    expected_experts = experts.cpu().clone()
    expected_experts[5, 1] = 4
    with use_backend("ascend"):
        rows, counts, places = ms_kernels.permute_tokens(x, experts, count=4)
    expected = ms_kernels.permute_tokens(x.cpu(), expected_experts, count=5)
    assert torch.equal(rows.cpu(), expected[0])
    assert counts.tolist() == expected[1][:4].tolist()
    assert torch.equal(places.cpu(), expected[2])
    assert places[5, 1].item() == len(rows) - 1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("index", OUT_OF_RANGE)
def test_an_out_of_range_row_index_gives_nan_for_its_token(index, weighted):
    """The other tokens are unchanged, forward and in the gradient of their rows."""
    example = CONTRACTS["unpermute_tokens"].draw({}, dtype=torch.float32, device="npu")
    rows, places = example["rows"].requires_grad_(), example["places"]
    weights = example["weights"] if weighted else None
    with use_backend("ascend"):
        expected = ms_kernels.unpermute_tokens(rows, places, weights).detach().cpu()
        places[5, 1] = index
        result = ms_kernels.unpermute_tokens(rows, places, weights)
        result.sum().backward()
    on_cpu = result.detach().cpu()
    assert on_cpu[5].isnan().all()
    valid = torch.arange(len(on_cpu)) != 5
    assert torch.equal(on_cpu[valid], expected[valid])
    assert rows.grad.shape == rows.shape


@pytest.mark.parametrize(
    "counts", [[20, 30, 0, 40], [20, 30, 0, 60], [-1, 97, 0, 0], [0, 0, 0, 0], [2**31 - 1] * 4]
)
def test_invalid_counts_give_a_nan_last_row(counts):
    """Counts too small, too large or negative; rows of valid counts before them are correct."""
    example = CONTRACTS["grouped_matmul"].draw({}, dtype=torch.float32, device="npu")
    x, weights = example["x"].requires_grad_(), example["weights"].requires_grad_()
    bad_counts = torch.tensor(counts, dtype=example["counts"].dtype, device="npu")
    with use_backend("ascend"):
        result = ms_kernels.grouped_matmul(x, weights, bad_counts)
    result.sum().backward()
    assert result[-1].isnan().all()
    assert not result[:-1].isnan().any()
    valid_rows = counts[0] if 0 < counts[0] < len(x) else 0
    torch.testing.assert_close(result[:valid_rows].cpu(), x[:valid_rows].cpu() @ weights[0].cpu())
    assert not x.grad.isnan().any()
    assert weights.grad.shape == weights.shape


@pytest.mark.parametrize("experts", [1, 4])
def test_valid_counts_give_no_nan(experts):
    """Also with a single expert."""
    example = CONTRACTS["grouped_matmul"].draw({"E": experts}, dtype=torch.float32, device="npu")
    with use_backend("ascend"):
        result = ms_kernels.grouped_matmul(**example)
    expected = ms_kernels.grouped_matmul(*(tensor.cpu() for tensor in example.values()))
    torch.testing.assert_close(result.cpu(), expected)
