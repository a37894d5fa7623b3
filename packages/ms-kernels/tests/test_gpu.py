"""What runs on an accelerator, against the truth in float64, on that accelerator."""

import pytest
import torch

import ms_kernels
from ms_kernels import ArgumentError, cross_entropy, explain, linear_cross_entropy
from ms_kernels.checking import check
from ms_kernels.operators import CONTRACTS
from ms_kernels.tuning.measure import one_pass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator here"),
]


@pytest.fixture
def device():
    """Return the accelerator of this machine."""
    return torch.accelerator.current_accelerator()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", CONTRACTS)
def test_every_backend_holds_on_the_accelerator(device, operator, dtype):
    """Results and gradients of all that takes the call there lie within tolerance."""
    findings = [each for each in check([operator], device=device, dtype=dtype) if not each.reason]
    assert findings
    assert [each for each in findings if not each.holds] == []


def test_kernels_are_chosen_there(device):
    """A call on the accelerator gets kernels of ours or its vendor's, not the reference."""
    for operator, contract in CONTRACTS.items():
        tensors = contract.draw({}, device=device, dtype=torch.bfloat16)
        assert explain(operator, **tensors).backend != "reference"


def test_linear_cross_entropy_never_holds_all_logits_there(device):
    """32,768 rows of 65,536 classes would be 8 GiB; the peak stays below 2.5 GiB."""
    hidden = torch.randn(32768, 64, device=device, requires_grad=True)
    weight = torch.randn(65536, 64, device=device, requires_grad=True)
    targets = torch.randint(65536, (32768,), device=device)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    assert torch.accelerator.max_memory_allocated() - before < 5 * 2**29


def test_gradients_are_the_same_in_every_run(device):
    """No addition depends on which program comes first."""
    for operator, contract in CONTRACTS.items():
        if contract.mutates or not any(each.differentiable for each in contract.arguments):
            continue
        drawn = list(contract.draw({}, device=device, dtype=torch.bfloat16).values())
        run = explain(operator, *drawn).implementation.run
        first, second = (
            one_pass(contract, run, tuple(drawn), contract.defaults, backward=True)()
            for _ in range(2)
        )
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True)), operator


@pytest.mark.parametrize("far", [-1, -(2**31), 2**31 - 1])
def test_an_index_out_of_range_makes_nan_there_and_the_device_goes_on(device, far):
    """No kernel follows it: the row at fault is NaN, others are numbers, the next call works."""
    drawn = {
        name: contract.draw({}, device=device, dtype=torch.bfloat16)
        for name, contract in CONTRACTS.items()
    }
    drawn["cross_entropy"]["targets"][5] = far
    drawn["linear_cross_entropy"]["targets"][5] = far
    drawn["token_log_probs"]["tokens"][5] = far
    drawn["decode_attention"]["page_table"][0, 0] = far
    drawn["unpermute_tokens"]["places"][5, 0] = far
    drawn["grouped_matmul"]["counts"][0] = far
    for operator, options, wrong in (
        ("cross_entropy", {"reduction": "none"}, 5),
        ("linear_cross_entropy", {"reduction": "none"}, 5),
        ("token_log_probs", {}, 5),
        ("decode_attention", {}, 0),
        ("unpermute_tokens", {}, 5),
    ):
        got = getattr(ms_kernels, operator)(**drawn[operator], **options).cpu()
        rows = got.flatten(1).isnan().any(1) if got.ndim > 1 else got.isnan()
        assert rows.nonzero().flatten().tolist() == [wrong], operator
    ms_kernels.grouped_matmul(**drawn["grouped_matmul"])
    torch.accelerator.synchronize()
    assert torch.ones(3, device=device).sum().item() == 3


def test_rows_that_no_expert_has_are_nan_there(device):
    """Too few counts leave rows over, which are never what was in memory before."""
    drawn = CONTRACTS["grouped_matmul"].draw({}, device=device, dtype=torch.bfloat16)
    drawn["counts"] = torch.tensor([10, 0, 20, 0], device=device)
    got = ms_kernels.grouped_matmul(**drawn).cpu()
    assert got[30:].isnan().all()
    assert not got[:30].isnan().any()


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_the_mean_over_no_target_is_zero_there(device, name):
    """And so are its gradients, from whichever kernel made them."""
    drawn = CONTRACTS[name].draw({}, device=device, dtype=torch.bfloat16)
    drawn["targets"].fill_(-100)
    leaves = [each.requires_grad_() for each in drawn.values() if each.is_floating_point()]
    loss = getattr(ms_kernels, name)(**drawn)
    slopes = torch.autograd.grad(loss, leaves)
    assert loss.item() == 0
    assert not any(each.any() for each in slopes)


def test_windows_that_are_not_causal_have_two_sides_there(device):
    """The kernel and the reference mean the same by every window."""
    drawn = CONTRACTS["attention"].draw({}, device=device)
    for window in (1, 7, 47, 48, 2**40):
        for causal in (False, True):
            options = {"window": window, "causal": causal}
            got = ms_kernels.attention(**drawn, **options)
            with ms_kernels.use_backend("reference"):
                truth = ms_kernels.attention(**drawn, **options)
            # float32 sums of 48 terms in another order.
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


def test_one_tensor_is_not_both_moments_there(device):
    """Addresses are compared on the host, so that nothing is waited for or written."""
    weights, gradient, moments = (torch.ones(64, device=device) for _ in range(3))
    with pytest.raises(ArgumentError, match="square is in the memory of mean"):
        ms_kernels.adamw_step(weights, gradient, moments, moments, step=1, learning_rate=0.1)


def test_float64_is_float64_there(device):
    """Results and gradients of what takes it lie within 1e-11 of the truth."""
    for operator in CONTRACTS:
        findings = check([operator], device=device, dtype=torch.float64)
        assert [each for each in findings if not each.holds and not each.reason] == []


def test_losses_agree_with_the_cpu(device):
    """The same inputs give the same loss on both, to float32's roundings."""
    logits, targets = torch.randn(512, 1000), torch.randint(1000, (512,))
    there = cross_entropy(logits.to(device), targets.to(device))
    # Sums of 1,000 terms in another order: below 1e-5 relative.
    torch.testing.assert_close(there.cpu(), cross_entropy(logits, targets), rtol=1e-5, atol=0)
