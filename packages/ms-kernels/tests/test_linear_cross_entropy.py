"""linear_cross_entropy: what it holds, what it skips, and where its sums are kept."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ms_kernels
from ms_kernels.operators.linear_cross_entropy import chunked_logits as module
from ms_kernels.operators.linear_cross_entropy.contract import linear_cross_entropy


class Largest(TorchDispatchMode):
    """Watches every result of every operation, and the memory alive at once."""

    def __init__(self):
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.size_bytes = max(self.size_bytes, each.untyped_storage().nbytes())
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
    """No more than one chunk of 1 MiB exists of 8 MiB of logits, forward or backward."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 2**20)
    hidden, weight, targets = draw(512, 8, 4096, dtype)
    with Largest() as largest:
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        loss.sum().backward()
    assert largest.size_bytes == 2**20


def peak(run):
    """Return the most memory in bytes that `run` held at once beyond what was there before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_its_peak_memory_is_one_chunk_and_the_gradients(monkeypatch):
    """Measured by the allocator: a chunk, the two gradients twice at most, and little else.

    64 MiB of logits; the plain way holds them three times over.
    """
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 2**20)
    hidden, weight, targets = draw(2048, 32, 8192)
    gradients = 4 * (hidden.numel() + weight.numel())

    def fused():
        linear_cross_entropy(hidden, weight, targets).backward()

    def plain():
        torch.nn.functional.cross_entropy(hidden @ weight.T, targets).backward()

    fused_peak = peak(fused)
    hidden.grad = weight.grad = None
    plain_peak = peak(plain)
    # The elementwise steps hold masks and sums of a row each: far below 1 MiB.
    assert fused_peak <= 4 * 2**20 + 2 * gradients + 2**20
    assert plain_peak >= 2 * 64 * 2**20
    assert fused_peak <= plain_peak / 10


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 65])
def test_chunks_do_not_change_the_answer(reduction, chunk_rows):
    """Losses and gradients are those of cross_entropy over all logits, whatever the chunk."""
    hidden, weight, targets = draw(64, 16, 50)
    targets[::5] = -100
    options = (-100, 0.1, 0.01, reduction)
    pull = torch.randn(64 if reduction == "none" else ())
    loss = linear_cross_entropy(hidden, weight, targets, *options, chunk_rows=chunk_rows)
    got = torch.autograd.grad(loss, (hidden, weight), pull)
    truth = ms_kernels.cross_entropy(
        hidden @ weight.T, targets, label_smoothing=0.1, z_loss=0.01, reduction=reduction
    )
    # float32 sums of at most 64 terms in another order.
    torch.testing.assert_close(loss, truth, rtol=1e-5, atol=1e-5)
    slopes = torch.autograd.grad(truth, (hidden, weight), pull)
    torch.testing.assert_close(got, slopes, rtol=1e-5, atol=1e-5)


class Products(TorchDispatchMode):
    """Counts the rows of logits that are made: products with the weight, transposed."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes
        self.rows = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function is torch.ops.aten.mm.out and result.shape[1] == self.classes:
            self.rows += result.shape[0]
        return result


PULLS = {
    "alike": (lambda rows: torch.full((rows,), 0.25), 0),
    "expanded": (lambda rows: torch.tensor(0.25).expand(rows), 0),
    "a quarter masked": (lambda rows: (torch.arange(rows) % 4 != 0) * 0.5, 16),
    "three quarters masked": (lambda rows: (torch.arange(rows) % 4 == 0) * 0.5, 16),
    "all different": (lambda rows: torch.linspace(0.5, 2, rows), 64),
    "none at all": (torch.zeros, 0),
}


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
def test_only_rows_whose_gradients_are_unusual_are_made_again(pull, frozen):
    """A loss a token, then any weighting: the gradients are right, and the logits made few."""
    hidden, weight, targets = draw(64, 16, 50)
    make, again = PULLS[pull]
    wanted = []
    for name, each in (("hidden", hidden), ("weight", weight)):
        each.requires_grad_(name != frozen)
        wanted += [each] if name != frozen else []
    loss = linear_cross_entropy(hidden, weight, targets, reduction="none", chunk_rows=8)
    with Products(50) as made:
        got = torch.autograd.grad(loss, wanted, make(64))
    assert made.rows == (0 if frozen == "weight" else again)
    truth = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    # float32 sums of at most 64 terms in another order, some taken away again.
    torch.testing.assert_close(
        got, torch.autograd.grad(truth, wanted, make(64)), rtol=1e-5, atol=2e-5
    )


def test_ignored_rows_do_not_count_as_unusual():
    """Their losses are 0 whatever their gradients are, and so are their shares."""
    hidden, weight, targets = draw(64, 16, 50)
    targets[:20] = -100
    pull = torch.ones(64)
    pull[:20] = torch.randn(20)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="none", chunk_rows=8)
    with Products(50) as made:
        got = torch.autograd.grad(loss, (hidden, weight), pull)
    assert made.rows == 0
    truth = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(
        got, torch.autograd.grad(truth, (hidden, weight), pull), rtol=1e-5, atol=1e-5
    )


def test_the_weight_gradient_is_summed_in_float32():
    """4,096 small equal terms, of which bfloat16 would lose all but the first few hundred.

    A bfloat16 sum stops growing where a term is below half a unit in its last place, at about
    256 terms. In float32 only the final rounding is left, half a unit: 2^-9 relative.
    """
    rows = 4096
    hidden = torch.ones(rows, 4, dtype=torch.bfloat16)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="sum", chunk_rows=1)
    loss.backward()
    # p = 1/8 for each class; the target's gradient is p - 1 a row.
    truth = torch.full((8, 4), rows / 8)
    truth[0] = rows * (1 / 8 - 1)
    torch.testing.assert_close(weight.grad.float(), truth, rtol=2**-8, atol=0)


def test_a_loss_scale_saves_small_float16_gradients():
    """Gradients made in the forward pass are not rounded to float16 before they are scaled."""
    hidden, weight, targets = draw(4096, 4, 64, torch.float16)
    scale = 2.0**14
    (linear_cross_entropy(hidden, weight, targets) * scale).backward()
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    (torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets) * scale).backward()
    for got, truth in zip((hidden, weight), wide, strict=True):
        # Two roundings to float16, and its smallest normal number where that is less.
        torch.testing.assert_close(got.grad.double(), truth.grad, rtol=2**-9, atol=2**-14)


def test_small_differences_survive_in_bfloat16_inputs():
    """Logits are not rounded to bfloat16 on the way: the loss is right to float32."""
    hidden, weight, targets = draw(256, 64, 1000, torch.bfloat16)
    loss = linear_cross_entropy(hidden * 4, weight, targets)
    logits = (hidden * 4).double() @ weight.double().T
    truth = torch.nn.functional.cross_entropy(logits, targets)
    # float32 products summed over 64 features, then over 1,000 classes: below 1e-5 relative.
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_graph_may_be_walked_twice(reduction):
    """With retain_graph gradients add up; what is held is not changed or handed out."""
    hidden, weight, targets = draw(16, 4, 10)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    loss.backward(retain_graph=True)
    once = hidden.grad.clone(), weight.grad.clone()
    weight.grad.mul_(3)
    weight.grad.div_(3)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(hidden.grad, 3 * once[0])
    torch.testing.assert_close(weight.grad, 3 * once[1])


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_costs_no_gradient(frozen):
    """Only the gradient that is wanted is made."""
    hidden, weight, targets = draw(16, 4, 10)
    full = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    kept = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    (got,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), kept)
    assert torch.equal(got, full[1] if frozen == "hidden" else full[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_are_never_multiplied_on_the_cpu(reduction):
    """With 7 of 8 targets ignored, the largest logits have an eighth of the rows."""
    hidden, weight, targets = draw(512, 128, 2048)
    targets[torch.arange(512) % 8 != 0] = -100
    options = {"reduction": reduction}
    assert ms_kernels.explain("linear_cross_entropy", hidden, weight, targets).backend == "cpu"
    with Largest() as largest:
        loss = ms_kernels.linear_cross_entropy(hidden, weight, targets, **options)
        got = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert largest.size_bytes == max(64 * 2048 * 4, weight.numel() * 4)
    with ms_kernels.use_backend("reference"):
        truth = ms_kernels.linear_cross_entropy(hidden, weight, targets, **options)
        slopes = torch.autograd.grad(truth.sum(), (hidden, weight))
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(got, slopes)
