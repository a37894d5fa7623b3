"""What the device is and refuses, asked in processes that have it; see `test_rig.py`."""

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


def said(action: Callable[[], Any]) -> str:
    """The first line of what an action raises; nothing if it goes through."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def mixed() -> dict[str, str]:
    """What is said of tensors that meet another device's."""
    there, here = torch.ones(3, 4, device="rig"), torch.ones(3, 4)
    rows = torch.zeros(3, 1, dtype=torch.int64)
    return {
        "sum": said(lambda: there + here),
        "sum, in place": said(lambda: here.add_(there)),
        "another of its kind": said(lambda: there + torch.ones(3, 4, device="rig:1")),
        "joined": said(lambda: torch.cat([there, here])),
        "looked up": said(lambda: F.embedding(rows, there)),
        "gathered": said(lambda: there.gather(1, rows)),
        "indexed from the CPU": said(lambda: here[rows.to("rig")]),
        "as numpy": said(lambda: there.numpy()),
        "chance of the CPU": said(lambda: torch.rand(2, device="rig", generator=torch.Generator())),
        "integers multiplied": said(lambda: there.long() @ there.long().t()),
    }


def allowed() -> dict[str, bool]:
    """What CUDA allows too."""
    there = torch.arange(12.0, device="rig").view(3, 4)
    return {
        "a number": torch.equal((there + torch.tensor(1.0)).cpu(), there.cpu() + 1),
        "indices of the CPU": torch.equal(there[torch.tensor([2])].cpu(), there.cpu()[[2]]),
        "a copy": torch.equal(torch.zeros(3, 4).copy_(there), there.cpu()),
        "its generator": torch.rand(2, generator=torch.Generator("rig"), device="rig").is_rig,
    }


def computed() -> dict[str, bool]:
    """Whether the device gives what the CPU gives."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)

    def train(place: str) -> list[Tensor]:
        own = weight.to(place, copy=True).requires_grad_()
        optimizer = torch.optim.AdamW([own], foreach=True)
        hidden = x.to(place)
        for _ in range(2):
            (F.silu(hidden @ own).square().sum() + own[2:, ::2].sum()).backward()
            optimizer.step()
        out = torch.empty(0, device=place)
        torch.mul(own.detach(), 2, out=out)
        out[:, 1] = 7
        out.t()[0].zero_()
        return [own.detach(), out]

    pairs = zip(train("cpu"), train("rig"), strict=True)
    fresh = torch.empty(5, device="rig")
    held = torch.accelerator.memory_allocated()
    kept = torch.zeros(1024, device="rig")
    grown = torch.accelerator.memory_allocated() - held
    return {
        "training": all(torch.equal(one, other.cpu()) for one, other in pairs),
        "fresh memory holds nothing": bool(fresh.isnan().all()),
        "bytes are counted": grown == kept.nbytes,
        "saved and read": _read_back(kept + 3).device == kept.device,
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
    """Random numbers of the device are its own, and go on from a state."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, state = torch.rand(4, device="rig"), torch.get_device_module("rig").get_rng_state()
    dropped = F.dropout(torch.ones(64, device="rig"))
    untouched = torch.equal(before, torch.get_rng_state())
    torch.get_device_module("rig").set_rng_state(state)
    again = F.dropout(torch.ones(64, device="rig"))
    torch.manual_seed(3)
    return {
        "the CPU's are untouched": untouched,
        "a seed repeats": torch.equal(first, torch.rand(4, device="rig")),
        "a state repeats": torch.equal(dropped, again),
        "a state is a seed and an offset": state.numel() == 16,
    }


def groups() -> dict[str, Any]:
    """Collectives between two devices, and what the group does not take."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("rigccl")
    one = torch.ones(4, device="rig")
    dist.all_reduce(one)
    mean = torch.full((2,), float(rank), device="rig")
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    under_way = torch.ones(2, device="rig")
    work = dist.all_reduce(under_way, async_op=True)
    unread = under_way.tolist()
    work.wait()
    changed = torch.ones(2, device="rig")
    work = dist.all_reduce(changed, async_op=True)
    changed.add_(1)
    gloo = dist.new_group(backend="gloo")
    found = {
        "sum": one.tolist(),
        "mean": mean.tolist(),
        "before waiting": unread,
        "after waiting": under_way.tolist(),
        "changed under way": said(work.wait),
        "a tensor of the CPU": said(lambda: dist.all_reduce(torch.ones(2))),
        "another device": said(lambda: dist.all_reduce(torch.ones(2, device=f"rig:{1 - rank}"))),
        "over gloo": said(lambda: dist.all_reduce(one, group=gloo)),
        "not contiguous": said(lambda: dist.all_reduce(torch.ones(2, 3, device="rig").t())),
    }
    return {**found, **_sharded(rank)}


def _sharded(rank: int) -> dict[str, Any]:
    """FSDP2 and DTensor on the device, against the whole model on the CPU."""
    mesh = init_device_mesh("rig", (2,))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    split = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("rig")
    split.load_state_dict(whole.state_dict())
    for layer in split:
        fully_shard(layer, mesh=mesh)
    fully_shard(split, mesh=mesh)
    for model, place in ((whole, "cpu"), (split, "rig")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4, device=place)).square().sum().backward()
        optimizer.step()
    shards = [parameter.full_tensor().cpu() for parameter in split.parameters()]
    spread = distribute_tensor(torch.ones(4, 4, device="rig"), mesh, [Shard(0)])
    return {
        "fsdp": all(map(torch.allclose, shards, whole.parameters())),
        "dtensor": spread.redistribute(mesh, [Replicate()]).to_local().sum().item(),
    }
