"""The accelerator backends against float64 truth, run on this machine's accelerator."""

import pytest
import torch

import ms_kernels
from ms_kernels import cross_entropy, explain, linear_cross_entropy
from ms_kernels.checking import check
from ms_kernels.operators import CONTRACTS
from ms_kernels.tuning.measure import one_pass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]


@pytest.fixture
def device():
    """Return this machine's accelerator."""
    return torch.accelerator.current_accelerator()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", CONTRACTS)
def test_every_backend_is_accurate_on_the_accelerator(device, operator, dtype):
    """Results and gradients of every backend that takes the call are within tolerance."""
    findings = [
        finding for finding in check([operator], device=device, dtype=dtype) if not finding.reason
    ]
    assert findings
    assert [finding for finding in findings if not finding.holds] == []


def test_a_fused_backend_is_chosen_on_the_accelerator(device):
    """Calls use our kernels or the vendor's, not the reference."""
    for operator, contract in CONTRACTS.items():
        tensors = contract.draw({}, device=device, dtype=torch.bfloat16)
        assert explain(operator, **tensors).backend != "reference"


def test_linear_cross_entropy_never_materializes_all_logits(device):
    """32,768 rows of 65,536 classes would be 8 GiB; the peak stays below 2.5 GiB."""
    hidden = torch.randn(32768, 64, device=device, requires_grad=True)
    weight = torch.randn(65536, 64, device=device, requires_grad=True)
    targets = torch.randint(65536, (32768,), device=device)
    torch.accelerator.reset_peak_memory_stats()
    allocated = torch.accelerator.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    assert torch.accelerator.max_memory_allocated() - allocated < 5 * 2**29


def test_gradients_are_deterministic(device):
    """No sum depends on the order in which programs run."""
    for operator, contract in CONTRACTS.items():
        if not any(argument.differentiable for argument in contract.arguments):
            continue
        tensors = list(contract.draw({}, device=device, dtype=torch.bfloat16).values())
        run = explain(operator, *tensors).implementation.run
        first, second = (
            one_pass(contract, run, tuple(tensors), contract.defaults, backward=True)()
            for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), operator


@pytest.mark.parametrize("index", [-1, -(2**31), 2**31 - 1])
def test_an_out_of_range_index_gives_nan_and_the_device_keeps_working(device, index):
    """Kernels do not follow it: only the faulty row is NaN, and the next call works."""
    examples = {
        name: contract.draw({}, device=device, dtype=torch.bfloat16)
        for name, contract in CONTRACTS.items()
    }
    examples["cross_entropy"]["targets"][5] = index
    examples["linear_cross_entropy"]["targets"][5] = index
    examples["token_log_probs"]["tokens"][5] = index
    examples["decode_attention"]["page_table"][0, 0] = index
    examples["unpermute_tokens"]["places"][5, 0] = index
    examples["grouped_matmul"]["counts"][0] = index
    for operator, options, nan_row in (
        ("cross_entropy", {"reduction": "none"}, 5),
        ("linear_cross_entropy", {"reduction": "none"}, 5),
        ("token_log_probs", {}, 5),
        ("decode_attention", {}, 0),
        ("unpermute_tokens", {}, 5),
    ):
        result = getattr(ms_kernels, operator)(**examples[operator], **options).cpu()
        is_nan = result.flatten(1).isnan().any(1) if result.ndim > 1 else result.isnan()
        assert is_nan.nonzero().flatten().tolist() == [nan_row], operator
    ms_kernels.grouped_matmul(**examples["grouped_matmul"])
    torch.accelerator.synchronize()
    assert torch.ones(3, device=device).sum().item() == 3


def test_rows_without_an_expert_are_nan(device):
    """Rows left over by counts that are too small never expose uninitialized memory."""
    example = CONTRACTS["grouped_matmul"].draw({}, device=device, dtype=torch.bfloat16)
    example["counts"] = torch.tensor([10, 0, 20, 0], device=device)
    result = ms_kernels.grouped_matmul(**example).cpu()
    assert result[30:].isnan().all()
    assert not result[:30].isnan().any()


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_the_mean_over_no_targets_is_zero(device, name):
    """Its gradients are zero as well."""
    example = CONTRACTS[name].draw({}, device=device, dtype=torch.bfloat16)
    example["targets"].fill_(-100)
    leaves = [tensor.requires_grad_() for tensor in example.values() if tensor.is_floating_point()]
    loss = getattr(ms_kernels, name)(**example)
    grads = torch.autograd.grad(loss, leaves)
    assert loss.item() == 0
    assert not any(grad.any() for grad in grads)


def test_windows_match_the_reference(device):
    """Without a causal mask a window has two sides, in the kernel and in the reference."""
    example = CONTRACTS["attention"].draw({}, device=device)
    for window in (1, 7, 47, 48, 2**40):
        for causal in (False, True):
            options = {"window": window, "causal": causal}
            result = ms_kernels.attention(**example, **options)
            with ms_kernels.use_backend("reference"):
                expected = ms_kernels.attention(**example, **options)
            # float32 sums of 48 terms in another order.
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_float64_is_accurate_to_float64(device):
    """Results and gradients of the backends that take float64 are within 1e-11 of the truth."""
    for operator in CONTRACTS:
        findings = check([operator], device=device, dtype=torch.float64)
        assert [finding for finding in findings if not finding.holds and not finding.reason] == []


def test_losses_agree_with_the_cpu(device):
    """The same inputs give the same loss on both, up to float32 rounding."""
    logits, targets = torch.randn(512, 1000), torch.randint(1000, (512,))
    device_loss = cross_entropy(logits.to(device), targets.to(device))
    # Sums of 1,000 terms in another order: below 1e-5 relative.
    torch.testing.assert_close(device_loss.cpu(), cross_entropy(logits, targets), rtol=1e-5, atol=0)
