"""Counts and decisions of steps on an emulated accelerator, for `test_step_counts.py`."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from typing import Any
from unittest.mock import patch

import torch
from runs import FAMILIES, build, global_batch, local_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ms_parallel import AdamWConfig, Engine, NextTokenLoss, StepLimits
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.loss import Output
from ms_parallel.host_copy import HostCopy
from ms_parallel.models.batch import Batch
from ms_parallel.optim.optimizers.adamw import FUSED_DEVICES

SETTINGS = {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 48}
COLLECTIVES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
"""Names of collectives by torch operator."""
COPIES = ("copy", "_to_copy", "clone", "_foreach_copy")
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::unique_dim")
"""Operators whose result the host needs at once: a number, or a size that depends on values."""
IGNORED = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


class StepCounter(TorchDispatchMode):
    """Counts collectives, kernels and copies on the device, and waits of the host for it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator and run it."""
        kwargs = kwargs or {}
        name = func.name()
        library, _, operator = name.partition(".")[0].partition("::")
        operator = operator.removesuffix("_")
        if "c10d" in library and operator not in IGNORED:
            self.counts[COLLECTIVES[operator]] += 1  # an operator unknown here is an error
        result = func(*args, **kwargs)
        if waits(name, result, args, kwargs):
            self.counts["host sync"] += 1
        elif library == "aten" and not is_free(func, operator) and on_device(result):
            self.counts["copies" if operator in COPIES else "kernels"] += 1
        return result

    @contextmanager
    def counting(self, engine: Engine) -> Iterator[None]:
        """Count also waits for copies, and the waits before the optimizer."""
        wait = HostCopy.wait

        def counted_wait(copies: HostCopy) -> Any:
            self.counts["host sync"] += copies.copied is not None
            return wait(copies)

        def before_optimizer(*_: object) -> None:
            self.counts["host sync before optimizer"] = self.counts["host sync"]

        hook = engine.optimizer.register_step_pre_hook(before_optimizer)
        try:
            with patch.object(HostCopy, "wait", counted_wait), self:
                yield
        finally:
            hook.remove()


def is_free(func: Any, operator: str) -> bool:
    """Whether an operator only makes a view or allocates memory."""
    return bool(func.is_view) or operator == "_unsafe_view" or "empty" in operator


def on_device(result: Any) -> bool:
    """Whether an operator wrote to a device."""
    outputs = result if isinstance(result, tuple | list) else [result]
    return any(isinstance(out, Tensor) and out.device.type != "cpu" for out in outputs)


def waits(name: str, result: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits in an operator: for a value, a size, or a copy to or from the CPU."""
    sources = [arg for arg in args if isinstance(arg, Tensor)]
    devices = {source.device.type for source in sources}
    if name.partition(".")[0] in READS:
        return devices != {"cpu"}
    if name not in ("aten::_to_copy", "aten::copy_") or kwargs.get("non_blocking"):
        return False
    if name == "aten::copy_" and args[2:] == (True,):
        return False
    # torch waits for each copy between the host and a device that is not `non_blocking`.
    return len(devices | {result.device.type}) > 1


def count_steps(jobs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Counts of the second step of each job, which has a layout, a family and engine settings."""
    # Its operators run on the CPU's kernels, so it has torch's fused AdamW, as CUDA does.
    FUSED_DEVICES.add("rig")
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), timeout_s=60)
        engine = build(FAMILIES.get(job["family"], SETTINGS), groups, **job["engine"])
        batches = [local_rows(global_batch(step), groups) for step in range(2)]
        engine.step(batches[0], NextTokenLoss())
        counter = StepCounter()
        with counter.counting(engine):
            assert engine.step(batches[1], NextTokenLoss()).skipped is None
        results.append(dict(sorted(counter.counts.items())))
    return results


class DivergingLoss(NextTokenLoss):
    """A loss that is not a number."""

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Return NaN, with gradients."""
        return super().__call__(output, batch) * nan


def decided_updates(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reports and final states of runs with skipped steps; see `decided_run`."""
    return [decided_run(**job) for job in jobs]


def decided_run(*, queued: bool, max_grad_norm: float) -> dict[str, Any]:
    """Reports and final state of seven steps, of which some are skipped.

    Args:
        queued: queue the update before the host knows the loss and the norm, or wait for them.
        max_grad_norm: norm to which gradients are clipped.
    """
    FUSED_DEVICES.add("rig")
    groups = connect(Layout(), timeout_s=60)
    # A small eps would let an update enlarge the rounding errors of gradients near 0.
    optimizer = AdamWConfig(
        learning_rate=1e-2, max_grad_norm=max_grad_norm, warmup_steps=3, eps=1e-3
    )
    engine = build(SETTINGS, groups, optimizer=optimizer)
    plain, diverging = NextTokenLoss(), DivergingLoss()
    low_loss, low_norm = StepLimits(loss=0.1), StepLimits(grad_norm=0.01)
    cases = [
        (plain, StepLimits()),
        (plain, low_loss),
        (plain, StepLimits(loss=100.0, grad_norm=100.0)),
        (diverging, StepLimits()),
        (plain, low_norm),
        (diverging, low_loss),
        (plain, StepLimits()),
    ]
    reports = []
    can_queue = property(lambda _: queued)
    with patch.object(type(engine.optimizer), "decides_on_device", can_queue):
        for step, (loss, limits) in enumerate(cases):
            report = engine.step(global_batch(step), loss, limits=limits)
            reports.append([report.skipped, report.loss, report.grad_norm, report.learning_rate])
    state = engine.state_dict()
    tensors = torch.cat([tensor.double().cpu().flatten() for tensor in state.values()])
    return {"reports": reports, "updates": engine.optimizer.update_count, "state": tensors.tolist()}
