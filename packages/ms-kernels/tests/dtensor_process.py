"""One of two gloo processes: the operators on DTensor against plain tensors, every placement.

Run as ``dtensor_process.py RANK PORT`` by test_distributed.py; exits with an error if they differ.
"""

import sys
import time

import opaque_operators
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ms_kernels
from ms_kernels import (
    ArgumentError,
    adamw_step,
    cross_entropy,
    explain,
    linear_cross_entropy,
    rms_norm,
)
from ms_kernels.operators import CONTRACTS


def compare_rms_norm(mesh, placement):
    """Fail unless x split as `placement` says gives what plain x gives."""
    torch.manual_seed(0)
    x, weight, pull = torch.randn(4, 6, 8), torch.randn(8), torch.randn(4, 6, 8)
    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    rms_norm(*plain).backward(pull)
    split = [
        distribute_tensor(x, mesh, [placement]).requires_grad_(),
        distribute_tensor(weight, mesh, [Replicate()]).requires_grad_(),
    ]
    assert explain("rms_norm", *split).backend == "reference"
    result = rms_norm(*split)
    assert isinstance(result, DTensor)
    # float32 sums of at most 48 terms, in another order.
    torch.testing.assert_close(result.full_tensor(), rms_norm(x, weight), rtol=1e-5, atol=1e-6)
    result.backward(distribute_tensor(pull, mesh, [placement]))
    for got, truth in zip(split, plain, strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), truth.grad, rtol=1e-5, atol=1e-5)


def compare_cross_entropy(mesh, placement, reduction):
    """Fail unless logits split as `placement` says give what plain ones give."""
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 6, 10), torch.randint(10, (4, 6))
    targets[0, :3] = -100
    settings = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": reduction}
    plain = logits.clone().requires_grad_()
    truth = cross_entropy(plain, targets, **settings)
    truth.sum().backward()
    split = distribute_tensor(logits, mesh, [placement]).requires_grad_()
    rows = placement if placement != Shard(2) else Replicate()
    loss = cross_entropy(split, distribute_tensor(targets, mesh, [rows]), **settings)
    torch.testing.assert_close(loss.full_tensor(), truth, rtol=1e-5, atol=1e-6)
    loss.sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-6)


def compare_opaque(mesh, name, placement, sizes):
    """Fail unless an opaque operator with its first argument split so gives what it gives whole."""
    contract = CONTRACTS[name]
    run = getattr(opaque_operators, name)
    drawn = list(contract.draw(sizes).values())
    answers, places = [], []
    for split in (False, True):
        leaves, given = [], []
        for place, (argument, tensor) in enumerate(zip(contract.arguments, drawn, strict=True)):
            each = tensor.clone()
            if split:
                spread = argument.dims == contract.arguments[0].dims
                shard = placement if spread or (place < 3 and name == "attention") else Replicate()
                each = distribute_tensor(each, mesh, [shard])
            if argument.differentiable:
                leaves.append(each.requires_grad_())
            given.append(each)
        results = run(*given, *contract.defaults)
        results = results if isinstance(results, tuple) else (results,)
        torch.manual_seed(1)
        pulls = [torch.randn(each.shape) for each in results]
        if split:
            places = [each.placements[0] for each in results]
            pulls = [
                distribute_tensor(pull, mesh, each.placements)
                for pull, each in zip(pulls, results, strict=True)
            ]
        grads = torch.autograd.grad(results, leaves, pulls)
        answers.append([each.full_tensor() if split else each for each in (*results, *grads)])
    # Sums over rows are added up in another order.
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-5)
    return places


def whole(tensor):
    """Return what processes hold together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare_by_parts(mesh, name, placements, sizes, **options):
    """Fail unless an operator of parts gives, forward and backward, what it gives of the whole.

    Returns the placements of its results.
    """
    contract, run = CONTRACTS[name], getattr(ms_kernels, name)
    drawn = list(contract.draw(sizes).values())
    if name != "permute_tokens":
        drawn[0] = drawn[0].view(4, -1, sizes["H"])
        drawn[2] = drawn[2].view(4, -1)
        drawn[2][0, :2] = -100
    answers, places = [], []
    for split in (False, True):
        given = [each.clone() for each in drawn]
        if split:
            given = [
                distribute_tensor(each, mesh, [placement])
                for each, placement in zip(given, placements, strict=True)
            ]
        leaves = [each.requires_grad_() for each in given if each.is_floating_point()]
        results = run(*given, **options)
        results = results if isinstance(results, tuple) else (results,)
        if split:
            assert all(isinstance(each, DTensor) for each in results)
            places = [each.placements[0] for each in results]
        pulled = [each for each in results if each.requires_grad]
        torch.manual_seed(1)
        pulls = [torch.randn(each.shape) for each in pulled]
        if split:
            pulls = [
                distribute_tensor(pull, mesh, each.placements)
                for pull, each in zip(pulls, pulled, strict=True)
            ]
        grads = torch.autograd.grad(pulled, leaves, pulls)
        answers.append([whole(each) for each in (*results, *grads)])
    # Sums over rows are added up in another order.
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-5)
    return places


def compare_losses_by_parts(mesh):
    """Rows split over batch or positions, features, classes, or not at all; odd numbers of rows."""
    sizes = {"...": 20, "H": 8, "V": 12}
    whole_, classes = Replicate(), Shard(0)
    for rows in (Replicate(), Shard(0), Shard(1), Shard(2)):
        held = rows if rows != Shard(2) else whole_
        for weight in (whole_, classes, Shard(1)):
            for targets in (held, whole_):
                placed = [rows, weight, targets]
                for reduction in ("mean", "sum", "none"):
                    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
                    (place,) = compare_by_parts(
                        mesh, "linear_cross_entropy", placed, sizes, **options
                    )
                    assert place == (held if reduction == "none" else whole_)
                for entropy in (False, True):
                    places = compare_by_parts(
                        mesh, "token_log_probs", placed, sizes, entropy=entropy, temperature=2.0
                    )
                    assert set(places) == {held}
    for x in (Replicate(), Shard(0), Shard(1)):
        for experts in (Replicate(), Shard(0)):
            placed = compare_by_parts(
                mesh, "permute_tokens", [x, experts], {"T": 5, "C": 2, "H": 7}, count=4
            )
            assert placed == [x if x == Shard(1) else whole_, whole_, whole_]
    hidden, table = torch.randn(4, 8), torch.randn(12, 8)
    split = distribute_tensor(hidden, mesh, [Shard(0)])
    targets = distribute_tensor(torch.zeros(4, dtype=torch.int64), mesh, [Shard(0)])
    with pytest.raises(ArgumentError, match="linear_cross_entropy: weight is a plain tensor"):
        linear_cross_entropy(split, table, targets)


def compare_adamw(mesh):
    """Fail unless a step on split tensors writes what a step on whole ones writes."""
    drawn = list(CONTRACTS["adamw_step"].draw({}).values())
    drawn = [each.view(10, 100) for each in drawn]
    split = [distribute_tensor(each.clone(), mesh, [Shard(0)]) for each in drawn]
    for tensors in (drawn, split):
        adamw_step(*tensors, step=3, learning_rate=0.1)
    for whole, parts in zip(drawn, split, strict=True):
        torch.testing.assert_close(parts.full_tensor(), whole, rtol=1e-6, atol=1e-7)
    split[1] = split[1].redistribute(mesh, [Replicate()])
    with pytest.raises(ArgumentError, match="gradient is placed as"):
        adamw_step(*split, step=3, learning_rate=0.1)


class Block(torch.nn.Module):
    """Attention of normalized rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.project = torch.nn.Linear(32, 32)

    def forward(self, x):
        """Return (B, S, 32) of (B, S, 32)."""
        q = self.project(opaque_operators.rms_norm(x, self.weight, 1e-6)).unflatten(-1, (4, 8))
        mixed = opaque_operators.attention(q, q, q, None, None, True, None, None)
        return x + mixed.flatten(-2)


def compare_fully_sharded(rank):
    """Fail unless blocks under FSDP2, half the batch on each process, train as they do alone."""
    gradients = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Block(), Block())
        batch = torch.randn(4, 6, 32)
        if sharded:
            for block in model:
                fully_shard(block)
            fully_shard(model)
            batch = batch[2 * rank : 2 * rank + 2]
        model(batch).square().mean().backward()
        found = [each.grad for each in model.parameters()]
        gradients.append([each.full_tensor() if sharded else each for each in found])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def main(rank, place):
    """Compare under every placement."""
    torch.set_num_threads(1)
    store = dist.FileStore(place, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        compare_rms_norm(mesh, placement)
        for reduction in ("mean", "none"):
            compare_cross_entropy(mesh, placement, reduction)
    rows = {"...": 6, "H": 8}
    for name in ("rms_norm", "add_rms_norm"):
        for placement in (Replicate(), Shard(0), Shard(1)):
            places = compare_opaque(mesh, name, placement, rows)
            # Rows stay where they are; features are gathered first.
            assert set(places) == {placement if placement == Shard(0) else Replicate()}, places
    heads = {"B": 2, "Sq": 4, "Sk": 6, "Hq": 4, "Hk": 2, "D": 4, "Dv": 4}
    for placement in (Shard(0), Shard(2), Shard(3)):
        places = compare_opaque(mesh, "attention", placement, heads)
        assert placement == Shard(3) or places == [placement], places
    compare_opaque(mesh, "attention", Shard(2), {**heads, "Hq": 3, "Hk": 1})
    compare_losses_by_parts(mesh)
    compare_adamw(mesh)
    compare_fully_sharded(rank)
    dist.destroy_process_group()
    time.sleep(0.5)  # a gloo thread that still lets go of tensors aborts an interpreter that ends


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
