"""A gloo process of two: operators on DTensor against plain tensors, for every placement.

Run as ``dtensor_process.py RANK PORT`` by test_distributed.py; exits with an error on a difference.
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
    cross_entropy,
    explain,
    linear_cross_entropy,
    rms_norm,
)
from ms_kernels.operators import CONTRACTS


def compare_rms_norm(mesh, placement):
    """Fail unless x placed as `placement` gives the same as plain x."""
    torch.manual_seed(0)
    x, weight, grad_out = torch.randn(4, 6, 8), torch.randn(8), torch.randn(4, 6, 8)
    plain_inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    rms_norm(*plain_inputs).backward(grad_out)
    split = [
        distribute_tensor(x, mesh, [placement]).requires_grad_(),
        distribute_tensor(weight, mesh, [Replicate()]).requires_grad_(),
    ]
    assert explain("rms_norm", *split).backend == "reference"
    result = rms_norm(*split)
    assert isinstance(result, DTensor)
    # float32 sums of at most 48 terms, in another order.
    torch.testing.assert_close(result.full_tensor(), rms_norm(x, weight), rtol=1e-5, atol=1e-6)
    result.backward(distribute_tensor(grad_out, mesh, [placement]))
    for sharded, plain in zip(split, plain_inputs, strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-5)


def compare_cross_entropy(mesh, placement, reduction):
    """Fail unless logits placed as `placement` give the same as plain ones."""
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 6, 10), torch.randint(10, (4, 6))
    targets[0, :3] = -100
    settings = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": reduction}
    plain = logits.clone().requires_grad_()
    expected = cross_entropy(plain, targets, **settings)
    expected.sum().backward()
    split = distribute_tensor(logits, mesh, [placement]).requires_grad_()
    rows = placement if placement != Shard(2) else Replicate()
    loss = cross_entropy(split, distribute_tensor(targets, mesh, [rows]), **settings)
    torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-5, atol=1e-6)
    loss.sum().backward()
    torch.testing.assert_close(split.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-6)


def compare_opaque(mesh, name, placement, sizes):
    """Fail unless an opaque operator gives the same with its first argument split as unsplit."""
    contract = CONTRACTS[name]
    run = getattr(opaque_operators, name)
    example = list(contract.draw(sizes).values())
    outputs, placements = [], []
    for split in (False, True):
        leaves, args = [], []
        for index, (argument, tensor) in enumerate(zip(contract.arguments, example, strict=True)):
            local = tensor.clone()
            if split:
                same_dims = argument.dims == contract.arguments[0].dims
                shard = (
                    placement if same_dims or (index < 3 and name == "attention") else Replicate()
                )
                local = distribute_tensor(local, mesh, [shard])
            if argument.differentiable:
                leaves.append(local.requires_grad_())
            args.append(local)
        results = run(*args, *contract.defaults)
        results = results if isinstance(results, tuple) else (results,)
        torch.manual_seed(1)
        grad_outputs = [torch.randn(result.shape) for result in results]
        if split:
            placements = [result.placements[0] for result in results]
            grad_outputs = [
                distribute_tensor(grad, mesh, result.placements)
                for grad, result in zip(grad_outputs, results, strict=True)
            ]
        grads = torch.autograd.grad(results, leaves, grad_outputs)
        outputs.append([tensor.full_tensor() if split else tensor for tensor in (*results, *grads)])
    # Sums over rows are accumulated in another order.
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    return placements


def full(tensor):
    """Return the global tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare_sharded(mesh, name, placements, sizes, **options):
    """Fail unless an operator on sharded inputs matches the unsharded one, forward and backward.

    Returns the placements of its results.
    """
    contract, run = CONTRACTS[name], getattr(ms_kernels, name)
    example = list(contract.draw(sizes).values())
    if name != "permute_tokens":
        example[0] = example[0].view(4, -1, sizes["H"])
        example[2] = example[2].view(4, -1)
        example[2][0, :2] = -100
    outputs, placements_out = [], []
    for split in (False, True):
        args = [tensor.clone() for tensor in example]
        if split:
            args = [
                distribute_tensor(tensor, mesh, [placement])
                for tensor, placement in zip(args, placements, strict=True)
            ]
        leaves = [tensor.requires_grad_() for tensor in args if tensor.is_floating_point()]
        results = run(*args, **options)
        results = results if isinstance(results, tuple) else (results,)
        if split:
            assert all(isinstance(result, DTensor) for result in results)
            placements_out = [result.placements[0] for result in results]
        differentiable = [result for result in results if result.requires_grad]
        torch.manual_seed(1)
        grad_outputs = [torch.randn(result.shape) for result in differentiable]
        if split:
            grad_outputs = [
                distribute_tensor(grad, mesh, result.placements)
                for grad, result in zip(grad_outputs, differentiable, strict=True)
            ]
        grads = torch.autograd.grad(differentiable, leaves, grad_outputs)
        outputs.append([full(tensor) for tensor in (*results, *grads)])
    # Sums over rows are accumulated in another order.
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    return placements_out


def compare_sharded_losses(mesh):
    """Rows split over batch or positions, features, classes, or not at all; odd numbers of rows."""
    sizes = {"...": 20, "H": 8, "V": 12}
    replicated, class_shard = Replicate(), Shard(0)
    for rows in (Replicate(), Shard(0), Shard(1), Shard(2)):
        row_placement = rows if rows != Shard(2) else replicated
        for weight in (replicated, class_shard, Shard(1)):
            for targets in (row_placement, replicated):
                placements = [rows, weight, targets]
                for reduction in ("mean", "sum", "none"):
                    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
                    (placement,) = compare_sharded(
                        mesh, "linear_cross_entropy", placements, sizes, **options
                    )
                    assert placement == (row_placement if reduction == "none" else replicated)
                for entropy in (False, True):
                    placements_out = compare_sharded(
                        mesh, "token_log_probs", placements, sizes, entropy=entropy, temperature=2.0
                    )
                    assert set(placements_out) == {row_placement}
    for x in (Replicate(), Shard(0), Shard(1)):
        for experts in (Replicate(), Shard(0)):
            placements = compare_sharded(
                mesh, "permute_tokens", [x, experts], {"T": 5, "C": 2, "H": 7}, count=4
            )
            assert placements == [x if x == Shard(1) else replicated, replicated, replicated]
    hidden, table = torch.randn(4, 8), torch.randn(12, 8)
    split = distribute_tensor(hidden, mesh, [Shard(0)])
    targets = distribute_tensor(torch.zeros(4, dtype=torch.int64), mesh, [Shard(0)])
    with pytest.raises(ArgumentError, match="linear_cross_entropy: weight is a plain tensor"):
        linear_cross_entropy(split, table, targets)


class Block(torch.nn.Module):
    """Attention over normalized rows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.project = torch.nn.Linear(32, 32)

    def forward(self, x):
        """Map (B, S, 32) to (B, S, 32)."""
        q = self.project(opaque_operators.rms_norm(x, self.weight, 1e-6)).unflatten(-1, (4, 8))
        mixed = opaque_operators.attention(q, q, q, None, None, True, None, None)
        return x + mixed.flatten(-2)


def compare_fully_sharded(rank):
    """Fail unless FSDP2 blocks, half the batch per process, get the gradients of plain blocks."""
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
        grads = [param.grad for param in model.parameters()]
        gradients.append([grad.full_tensor() if sharded else grad for grad in grads])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def main(rank, store_path):
    """Compare under every placement."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        compare_rms_norm(mesh, placement)
        for reduction in ("mean", "none"):
            compare_cross_entropy(mesh, placement, reduction)
    rows = {"...": 6, "H": 8}
    for name in ("rms_norm", "add_rms_norm"):
        for placement in (Replicate(), Shard(0), Shard(1)):
            placements = compare_opaque(mesh, name, placement, rows)
            # Sharded rows stay in place; features are gathered first.
            assert set(placements) == {placement if placement == Shard(0) else Replicate()}, (
                placements
            )
    heads = {"B": 2, "Sq": 4, "Sk": 6, "Hq": 4, "Hk": 2, "D": 4, "Dv": 4}
    for placement in (Shard(0), Shard(2), Shard(3)):
        placements = compare_opaque(mesh, "attention", placement, heads)
        assert placement == Shard(3) or placements == [placement], placements
    compare_opaque(mesh, "attention", Shard(2), {**heads, "Hq": 3, "Hk": 1})
    compare_sharded_losses(mesh)
    compare_fully_sharded(rank)
    dist.destroy_process_group()
    time.sleep(0.5)  # a gloo thread that still frees tensors at exit aborts the interpreter


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
