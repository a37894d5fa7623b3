"""What runs on an accelerator, against the truth in float64, on that accelerator."""

import pytest
import torch

from ms_kernels import cross_entropy, explain, linear_cross_entropy
from ms_kernels.check import check
from ms_kernels.dispatch import CONTRACTS
from ms_kernels.measure import one_pass

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


def test_losses_agree_with_the_cpu(device):
    """The same inputs give the same loss on both, to float32's roundings."""
    logits, targets = torch.randn(512, 1000), torch.randint(1000, (512,))
    there = cross_entropy(logits.to(device), targets.to(device))
    # Sums of 1,000 terms in another order: below 1e-5 relative.
    torch.testing.assert_close(there.cpu(), cross_entropy(logits, targets), rtol=1e-5, atol=0)
