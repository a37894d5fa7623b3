"""linear_cross_entropy: memory use, skipped rows, and precision of its sums."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ms_kernels
from ms_kernels.operators.linear_cross_entropy import chunked_logits as chunked_logits
from ms_kernels.operators.linear_cross_entropy.contract import linear_cross_entropy


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.size_bytes = max(self.size_bytes, leaf.untyped_storage().nbytes())
        return result


def draw(rows, width, classes, dtype=torch.float32):
    """Draw hidden (rows, width), weight (classes, width) and targets (rows,)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, generator=generator) * width**-0.5
    targets = torch.randint(classes, (rows,), generator=generator)
    return hidden, weight.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch, reduction, dtype):
    """At most one 1 MiB chunk of the 8 MiB of logits exists, forward or backward."""
    monkeypatch.setattr(chunked_logits, "CHUNK_BYTES", 2**20)
    hidden, weight, targets = draw(512, 8, 4096, dtype)
    with LargestTensor() as largest:
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        loss.sum().backward()
    assert largest.size_bytes == 2**20


def peak_bytes(run):
    """Return the peak memory in bytes that `run` allocates beyond the memory in use before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    allocated = maximum = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            maximum = max(maximum, allocated)
    return maximum


def test_peak_memory_is_one_chunk_and_the_gradients(monkeypatch):
    """Measured by the allocator: one chunk, at most twice the two gradients, and little more.

    The logits take 64 MiB; the unfused version holds three copies.
    """
    monkeypatch.setattr(chunked_logits, "CHUNK_BYTES", 4 * 2**20)
    hidden, weight, targets = draw(2048, 32, 8192)
    gradients = 4 * (hidden.numel() + weight.numel())

    def fused():
        linear_cross_entropy(hidden, weight, targets).backward()

    def unfused():
        torch.nn.functional.cross_entropy(hidden @ weight.T, targets).backward()

    fused_peak = peak_bytes(fused)
    hidden.grad = weight.grad = None
    plain_peak = peak_bytes(unfused)
    # The elementwise steps hold masks and one sum per row: far below 1 MiB.
    assert fused_peak <= 4 * 2**20 + 2 * gradients + 2**20
    assert plain_peak >= 2 * 64 * 2**20
    assert fused_peak <= plain_peak / 10


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 65])
def test_chunking_does_not_change_the_result(reduction, chunk_rows):
    """Losses and gradients match cross_entropy over all logits for any chunk size."""
    hidden, weight, targets = draw(64, 16, 50)
    targets[::5] = -100
    options = (-100, 0.1, 0.01, reduction)
    grad_out = torch.randn(64 if reduction == "none" else ())
    loss = linear_cross_entropy(hidden, weight, targets, *options, chunk_rows=chunk_rows)
    grads = torch.autograd.grad(loss, (hidden, weight), grad_out)
    expected = ms_kernels.cross_entropy(
        hidden @ weight.T, targets, label_smoothing=0.1, z_loss=0.01, reduction=reduction
    )
    # float32 sums of at most 64 terms in another order.
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected_grads = torch.autograd.grad(expected, (hidden, weight), grad_out)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-5)


class LogitProducts(TorchDispatchMode):
    """Count the rows of logits computed: products with the transposed weight."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes
        self.rows = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function is torch.ops.aten.mm.out and result.shape[1] == self.classes:
            self.rows += result.shape[0]
        return result


GRAD_OUTPUTS = {
    "alike": (lambda rows: torch.full((rows,), 0.25), 0),
    "expanded": (lambda rows: torch.tensor(0.25).expand(rows), 0),
    "a quarter masked": (lambda rows: (torch.arange(rows) % 4 != 0) * 0.5, 16),
    "three quarters masked": (lambda rows: (torch.arange(rows) % 4 == 0) * 0.5, 16),
    "all different": (lambda rows: torch.linspace(0.5, 2, rows), 64),
    "none at all": (torch.zeros, 0),
}


@pytest.mark.parametrize("grad_out", GRAD_OUTPUTS)
@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
def test_only_rows_with_unusual_gradients_are_recomputed(grad_out, frozen):
    """A loss per token with any weighting gets exact gradients and recomputes few logits."""
    hidden, weight, targets = draw(64, 16, 50)
    make_grad, recomputed_rows = GRAD_OUTPUTS[grad_out]
    inputs = []
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        tensor.requires_grad_(name != frozen)
        inputs += [tensor] if name != frozen else []
    loss = linear_cross_entropy(hidden, weight, targets, reduction="none", chunk_rows=8)
    with LogitProducts(50) as products:
        grads = torch.autograd.grad(loss, inputs, make_grad(64))
    assert products.rows == (0 if frozen == "weight" else recomputed_rows)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    # float32 sums of at most 64 terms in another order, some subtracted again.
    torch.testing.assert_close(
        grads, torch.autograd.grad(expected, inputs, make_grad(64)), rtol=1e-5, atol=2e-5
    )


def test_ignored_rows_are_not_recomputed():
    """Their losses and input gradients are 0 for any output gradients."""
    hidden, weight, targets = draw(64, 16, 50)
    targets[:20] = -100
    grad_out = torch.ones(64)
    grad_out[:20] = torch.randn(20)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="none", chunk_rows=8)
    with LogitProducts(50) as products:
        grads = torch.autograd.grad(loss, (hidden, weight), grad_out)
    assert products.rows == 0
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(
        grads, torch.autograd.grad(expected, (hidden, weight), grad_out), rtol=1e-5, atol=1e-5
    )


def test_the_weight_gradient_is_summed_in_float32():
    """Sum 4,096 small equal terms; bfloat16 would lose all but the first few hundred.

    A bfloat16 sum stops growing where a term is below half a unit in its last place, at about
    256 terms. In float32 only the final rounding remains, half a unit: 2^-9 relative.
    """
    rows = 4096
    hidden = torch.ones(rows, 4, dtype=torch.bfloat16)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="sum", chunk_rows=1)
    loss.backward()
    # p = 1/8 for each class; each row adds p - 1 to the target's gradient.
    expected = torch.full((8, 4), rows / 8)
    expected[0] = rows * (1 / 8 - 1)
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2**-8, atol=0)


def test_a_loss_scale_saves_small_float16_gradients():
    """Gradients computed in the forward pass are not rounded to float16 before scaling."""
    hidden, weight, targets = draw(4096, 4, 64, torch.float16)
    scale = 2.0**14
    (linear_cross_entropy(hidden, weight, targets) * scale).backward()
    wide_inputs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    (
        torch.nn.functional.cross_entropy(wide_inputs[0] @ wide_inputs[1].T, targets) * scale
    ).backward()
    for tensor, wide in zip((hidden, weight), wide_inputs, strict=True):
        # Two roundings to float16, or its smallest normal number if that is larger.
        torch.testing.assert_close(tensor.grad.double(), wide.grad, rtol=2**-9, atol=2**-14)


def test_small_differences_survive_in_bfloat16_inputs():
    """Logits are not rounded to bfloat16, so the loss is accurate to float32."""
    hidden, weight, targets = draw(256, 64, 1000, torch.bfloat16)
    loss = linear_cross_entropy(hidden * 4, weight, targets)
    logits = (hidden * 4).double() @ weight.double().T
    expected = torch.nn.functional.cross_entropy(logits, targets)
    # float32 products summed over 64 features, then over 1,000 classes: below 1e-5 relative.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_backward_can_run_twice(reduction):
    """With retain_graph gradients accumulate; saved buffers are neither changed nor exposed."""
    hidden, weight, targets = draw(16, 4, 10)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    loss.backward(retain_graph=True)
    first_grads = hidden.grad.clone(), weight.grad.clone()
    weight.grad.mul_(3)
    weight.grad.div_(3)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(hidden.grad, 3 * first_grads[0])
    torch.testing.assert_close(weight.grad, 3 * first_grads[1])


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen):
    """Only the requested gradient is computed."""
    hidden, weight, targets = draw(16, 4, 10)
    both_grads = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, targets), (hidden, weight)
    )
    trained = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), trained)
    assert torch.equal(grad, both_grads[1] if frozen == "hidden" else both_grads[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_are_not_multiplied_on_the_cpu(reduction):
    """With 7 of 8 targets ignored, the largest logits tensor has an eighth of the rows."""
    hidden, weight, targets = draw(512, 128, 2048)
    targets[torch.arange(512) % 8 != 0] = -100
    options = {"reduction": reduction}
    assert ms_kernels.explain("linear_cross_entropy", hidden, weight, targets).backend == "cpu"
    with LargestTensor() as largest:
        loss = ms_kernels.linear_cross_entropy(hidden, weight, targets, **options)
        grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert largest.size_bytes == max(64 * 2048 * 4, weight.numel() * 4)
    with ms_kernels.use_backend("reference"):
        expected = ms_kernels.linear_cross_entropy(hidden, weight, targets, **options)
        expected_grads = torch.autograd.grad(expected.sum(), (hidden, weight))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, expected_grads)
