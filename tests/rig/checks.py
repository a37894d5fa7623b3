"""Checks that run in processes with the device; see `test_rig.py`."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F


def error_of(action: Callable[[], Any]) -> str:
    """First line of the error that an action raises; empty if it succeeds."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def mixed() -> dict[str, str]:
    """Errors for operators on tensors of different devices."""
    on_rig, on_cpu = torch.ones(3, 4, device="rig"), torch.ones(3, 4)
    rows = torch.zeros(3, 1, dtype=torch.int64)
    return {
        "sum": error_of(lambda: on_rig + on_cpu),
        "sum, in place": error_of(lambda: on_cpu.add_(on_rig)),
        "another rig device": error_of(lambda: on_rig + torch.ones(3, 4, device="rig:1")),
        "concatenated": error_of(lambda: torch.cat([on_rig, on_cpu])),
        "embedding": error_of(lambda: F.embedding(rows, on_rig)),
        "gathered": error_of(lambda: on_rig.gather(1, rows)),
        "indexed from the CPU": error_of(lambda: on_cpu[rows.to("rig")]),
        "as numpy": error_of(lambda: on_rig.numpy()),
        "generator of the CPU": error_of(
            lambda: torch.rand(2, device="rig", generator=torch.Generator())
        ),
        "integer matmul": error_of(lambda: on_rig.long() @ on_rig.long().t()),
    }


def allowed() -> dict[str, bool]:
    """Operations that CUDA allows too."""
    on_rig = torch.arange(12.0, device="rig").view(3, 4)
    return {
        "a number": torch.equal((on_rig + torch.tensor(1.0)).cpu(), on_rig.cpu() + 1),
        "indices of the CPU": torch.equal(on_rig[torch.tensor([2])].cpu(), on_rig.cpu()[[2]]),
        "a copy": torch.equal(torch.zeros(3, 4).copy_(on_rig), on_rig.cpu()),
        "its generator": torch.rand(2, generator=torch.Generator("rig"), device="rig").is_rig,
    }


def computed() -> dict[str, bool]:
    """Whether the device computes the same as the CPU."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)

    def train(device: str) -> list[Tensor]:
        param = weight.to(device, copy=True).requires_grad_()
        optimizer = torch.optim.AdamW([param], foreach=True)
        hidden = x.to(device)
        for _ in range(2):
            (F.silu(hidden @ param).square().sum() + param[2:, ::2].sum()).backward()
            optimizer.step()
        output = torch.empty(0, device=device)
        torch.mul(param.detach(), 2, out=output)
        output[:, 1] = 7
        output.t()[0].zero_()
        return [param.detach(), output]

    pairs = zip(train("cpu"), train("rig"), strict=True)
    fresh = torch.empty(5, device="rig")
    bytes_before = torch.accelerator.memory_allocated()
    buffer = torch.zeros(1024, device="rig")
    increase = torch.accelerator.memory_allocated() - bytes_before
    return {
        "training": all(torch.equal(expected, actual.cpu()) for expected, actual in pairs),
        "fresh memory is NaN": bool(fresh.isnan().all()),
        "bytes are counted": increase == buffer.nbytes,
        "saved and read": _read_back(buffer + 3).device == buffer.device,
        "devices": torch.accelerator.device_count() == 8,
    }


def _read_back(tensor: Tensor) -> Tensor:
    import io

    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    read: Tensor = torch.load(file)
    return read


def chance() -> dict[str, bool]:
    """The device has its own random numbers, which continue from a saved state."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, state = torch.rand(4, device="rig"), torch.get_device_module("rig").get_rng_state()
    dropped = F.dropout(torch.ones(64, device="rig"))
    untouched = torch.equal(before, torch.get_rng_state())
    torch.get_device_module("rig").set_rng_state(state)
    repeated = F.dropout(torch.ones(64, device="rig"))
    torch.manual_seed(3)
    return {
        "the CPU's are untouched": untouched,
        "a seed repeats": torch.equal(first, torch.rand(4, device="rig")),
        "a state repeats": torch.equal(dropped, repeated),
        "a state is a seed and an offset": state.numel() == 16,
    }


def groups() -> dict[str, Any]:
    """Collectives between two devices, and tensors that the group rejects."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("rigccl")
    ones = torch.ones(4, device="rig")
    dist.all_reduce(ones)
    mean = torch.full((2,), float(rank), device="rig")
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    pending = torch.ones(2, device="rig")
    work = dist.all_reduce(pending, async_op=True)
    unread = pending.tolist()
    work.wait()
    changed = torch.ones(2, device="rig")
    work = dist.all_reduce(changed, async_op=True)
    changed.add_(1)
    gloo = dist.new_group(backend="gloo")
    results = {
        "sum": ones.tolist(),
        "mean": mean.tolist(),
        "before waiting": unread,
        "after waiting": pending.tolist(),
        "changed during a collective": error_of(work.wait),
        "a tensor of the CPU": error_of(lambda: dist.all_reduce(torch.ones(2))),
        "another device": error_of(
            lambda: dist.all_reduce(torch.ones(2, device=f"rig:{1 - rank}"))
        ),
        "over gloo": error_of(lambda: dist.all_reduce(ones, group=gloo)),
        "not contiguous": error_of(lambda: dist.all_reduce(torch.ones(2, 3, device="rig").t())),
    }
    return {**results, **_sharded(rank)}


def _sharded(rank: int) -> dict[str, Any]:
    """FSDP2 and DTensor on the device, compared with the full model on the CPU."""
    mesh = init_device_mesh("rig", (2,))
    torch.manual_seed(0)
    full = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("rig")
    sharded.load_state_dict(full.state_dict())
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for model, device in ((full, "cpu"), (sharded, "rig")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4, device=device)).square().sum().backward()
        optimizer.step()
    shards = [parameter.full_tensor().cpu() for parameter in sharded.parameters()]
    distributed = distribute_tensor(torch.ones(4, 4, device="rig"), mesh, [Shard(0)])
    return {
        "fsdp": all(map(torch.allclose, shards, full.parameters())),
        "dtensor": distributed.redistribute(mesh, [Replicate()]).to_local().sum().item(),
    }
