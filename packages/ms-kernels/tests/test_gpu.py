"""What runs on an accelerator, against the truth in float64, on that accelerator."""

import pytest
import torch

from ms_kernels import cross_entropy, explain, linear_cross_entropy
from ms_kernels.check import check
from ms_kernels.dispatch import CONTRACTS

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


def test_the_same_call_is_refused_or_taken_there_as_the_pure_choice_says(device):
    """A choice made from a description equals the one made from tensors."""
    for operator, contract in CONTRACTS.items():
        tensors = contract.draw({}, device=device)
        from_tensors = explain(operator, **tensors)
        assert from_tensors.backend == "reference"


def test_linear_cross_entropy_never_holds_all_logits_there(device):
    """8,192 rows of 65,536 classes would be 2 GiB; the peak stays below an eighth of it."""
    hidden = torch.randn(8192, 64, device=device, requires_grad=True)
    weight = torch.randn(65536, 64, device=device, requires_grad=True)
    targets = torch.randint(65536, (8192,), device=device)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    assert torch.accelerator.max_memory_allocated() - before < 2**28


def test_losses_agree_with_the_cpu(device):
    """The same inputs give the same loss on both, to float32's roundings."""
    logits, targets = torch.randn(512, 1000), torch.randint(1000, (512,))
    there = cross_entropy(logits.to(device), targets.to(device))
    # Sums of 1,000 terms in another order: below 1e-5 relative.
    torch.testing.assert_close(there.cpu(), cross_entropy(logits, targets), rtol=1e-5, atol=0)
