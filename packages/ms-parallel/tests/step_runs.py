"""Counts of collectives and host synchronizations in a step, for `test_step_counts.py`."""

from collections import Counter
from typing import Any

from runs import FAMILIES, build, global_batch, local_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ms_parallel import NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout

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
IGNORED = ("wait_tensor", "_wrap_tensor_autograd", "barrier")


class StepCounter(TorchDispatchMode):
    """Counts collectives by name, and operators that make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator and run it."""
        name = func.name()
        library, _, operator = name.partition(".")[0].partition("::")
        operator = operator.removesuffix("_")
        if "c10d" in library and operator not in IGNORED:
            self.counts[COLLECTIVES[operator]] += 1  # an operator unknown here is an error
        result = func(*args, **(kwargs or {}))
        if is_sync(name, result, args):
            self.counts["host sync"] += 1
        return result


def is_sync(name: str, result: Any, args: Any) -> bool:
    """Whether an operator needs device values on the host: a read, or a copy to the CPU."""
    sources = [arg for arg in args if isinstance(arg, Tensor) and arg.device.type != "cpu"]
    if name in ("aten::_local_scalar_dense", "aten::nonzero"):
        return bool(sources)
    to_host = isinstance(result, Tensor) and result.device.type == "cpu"
    return name in ("aten::_to_copy", "aten::copy_") and to_host and bool(sources)


def count_steps(jobs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Counts of the second step of each job, which has a layout, a family and engine settings."""
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), timeout_s=60)
        engine = build(FAMILIES.get(job["family"], SETTINGS), groups, **job["engine"])
        batches = [local_rows(global_batch(step), groups) for step in range(2)]
        engine.step(batches[0], NextTokenLoss())
        with StepCounter() as counter:
            assert engine.step(batches[1], NextTokenLoss()).skipped is None
        results.append(dict(sorted(counter.counts.items())))
    return results
