"""One of two gloo processes: the operators on DTensor against plain tensors, every placement.

Run as ``dtensor_process.py RANK PORT`` by test_distributed.py; exits with an error if they differ.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ms_kernels import cross_entropy, explain, rms_norm


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


def main(rank, port):
    """Compare under every placement."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        compare_rms_norm(mesh, placement)
        for reduction in ("mean", "none"):
            compare_cross_entropy(mesh, placement, reduction)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
