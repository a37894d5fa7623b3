"""Enumerates all layouts of a model for a number of processes, with reasons for exclusions."""

from collections.abc import Callable, Collection, Iterator
from math import gcd

from attrs import define, field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ParallelError
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.layouts.candidate import Split
from ms_parallel.planner.layouts.sizes import ModelSizes


@frozen(kw_only=True)
class Exclusion:
    """Candidates excluded for one reason."""

    count: int
    example: str
    """An excluded candidate and the details."""


@define
class ExclusionCounts:
    """Counts excluded candidates by reason."""

    counts: dict[str, Exclusion] = field(factory=dict)

    def add(self, reason: str, example: str, count: int = 1) -> None:
        """Count excluded candidates; the first one is the example of its reason."""
        previous = self.counts.get(reason)
        total = count + (previous.count if previous else 0)
        self.counts[reason] = Exclusion(
            count=total, example=previous.example if previous else example
        )


def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def splits(
    sizes: ModelSizes,
    cluster: Cluster,
    *,
    devices: int,
    batch_size: int,
    check: Callable[[Layout], None],
    allowed_rows: Collection[int] | None,
    reasons: ExclusionCounts,
) -> Iterator[Split]:
    """Yield layouts of `devices` processes with each microbatch size that divides their rows.

    Args:
        sizes: sizes of the model.
        cluster: cluster, which keeps tensor ranks within a node, and copies between nodes.
        devices: number of processes.
        batch_size: rows per step over all processes.
        check: raises the engine's error for an unsupported layout.
        allowed_rows: allowed microbatch sizes; None for all.
        reasons: receives the reasons for exclusions.
    """
    for layout in layouts(sizes, cluster, devices, batch_size, check, reasons):
        rows = batch_size // layout.data_ranks
        for size in divisors(rows):
            if allowed_rows is None or size in allowed_rows:
                yield Split(layout=layout, rows=size, microbatches=rows // size)


def layouts(
    sizes: ModelSizes,
    cluster: Cluster,
    devices: int,
    batch_size: int,
    check: Callable[[Layout], None],
    reasons: ExclusionCounts,
) -> Iterator[Layout]:
    """Yield the layouts of `devices` processes that fit the model and the batch."""
    # Tensor ranks communicate several times per layer, so they stay within a node.
    max_tensor = min(devices, cluster.devices_per_node)
    for tensor in divisors(devices):
        if tensor > max_tensor:
            reasons.add("tensor ranks would communicate between nodes", f"tensor={tensor}")
            continue
        for pipeline in divisors(devices // tensor):
            if pipeline > len(sizes.cuts):
                limit = f"the model can be cut into {len(sizes.cuts)} stages"
                reasons.add("more stages than the model has", f"pipeline={pipeline}: {limit}")
                continue
            for context in divisors(devices // tensor // pipeline):
                data = devices // (tensor * pipeline * context)
                sizes_by_axis = {
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "context": context,
                    "data": data,
                }
                if batch_size % data:
                    layout = Layout(**sizes_by_axis)
                    text = f"{layout}: batch_size={batch_size} does not divide over data={data}"
                    reasons.add("the batch does not divide", text)
                    continue
                yield from _grouped(sizes_by_axis, sizes, max_tensor, check, reasons)


def _grouped(
    sizes_by_axis: dict[str, int],
    sizes: ModelSizes,
    max_tensor: int,
    check: Callable[[Layout], None],
    reasons: ExclusionCounts,
) -> Iterator[Layout]:
    """Yield each number of expert ranks, without and with copies between nodes."""
    tokens = sizes_by_axis["data"] * sizes_by_axis["context"]
    # Shard within a node, and replicate between nodes.
    # The largest number of token ranks that divides all of them and fits into a node.
    per_node = gcd(tokens, max(1, max_tensor // sizes_by_axis["tensor"]))
    copies = [1, tokens // per_node] if 1 < per_node < tokens else [1]
    experts = [n for n in divisors(tokens) if sizes.experts % n == 0] if sizes.experts else [1]
    for replicate in copies:
        for expert in experts:
            # Each replica has all experts, divided over its ranks.
            if tokens // replicate % expert:
                continue
            layout = Layout(**sizes_by_axis, expert=expert, replicate=replicate)
            try:
                check(layout)
            except ParallelError as error:
                reasons.add("the engine refuses it", f"{layout}: {error}")
                continue
            yield layout
