"""Every layout that some processes can run a model under, and why the others cannot."""

from collections.abc import Callable, Collection, Iterator
from math import gcd

from attrs import define, field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ParallelError
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.layouts.candidate import Split
from ms_parallel.planner.layouts.sizes import ModelSizes


@frozen(kw_only=True)
class FallenOut:
    """Candidates that fell out for one reason."""

    count: int
    example: str
    """One of them, and what is said of it."""


@define
class Reasons:
    """Why candidates fall out, counted."""

    found: dict[str, FallenOut] = field(factory=dict)

    def add(self, reason: str, example: str, count: int = 1) -> None:
        """Count candidates that fall out for a reason; the first one is its example."""
        known = self.found.get(reason)
        total = count + (known.count if known else 0)
        self.found[reason] = FallenOut(count=total, example=known.example if known else example)


def divisors(number: int) -> list[int]:
    """List all divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def splits(
    sizes: ModelSizes,
    cluster: Cluster,
    *,
    devices: int,
    batch_size: int,
    check: Callable[[Layout], None],
    kept: Collection[int] | None,
    reasons: Reasons,
) -> Iterator[Split]:
    """Yield layouts of so many devices, with each size of microbatches that divides their rows.

    Args:
        sizes: of the model.
        cluster: whose nodes tensor ranks do not leave, and copies are kept within.
        devices: processes of each layout.
        batch_size: rows of an update over all processes.
        check: raises what the engine has against a layout.
        kept: the only sizes of microbatches that are asked for; None for all.
        reasons: takes why layouts fall out.
    """
    for layout in layouts(sizes, cluster, devices, batch_size, check, reasons):
        rows = batch_size // layout.readers
        for size in divisors(rows):
            if kept is None or size in kept:
                yield Split(layout=layout, rows=size, microbatches=rows // size)


def layouts(
    sizes: ModelSizes,
    cluster: Cluster,
    devices: int,
    batch_size: int,
    check: Callable[[Layout], None],
    reasons: Reasons,
) -> Iterator[Layout]:
    """Yield the layouts of so many devices that the model and the batch can be run under."""
    within = min(devices, cluster.devices_per_node)
    for tensor in divisors(devices):
        if tensor > within:
            reasons.add("tensor ranks would talk between nodes", f"tensor={tensor}")
            continue
        for pipeline in divisors(devices // tensor):
            if pipeline > len(sizes.cuts):
                most = f"the model can be cut into {len(sizes.cuts)} stages"
                reasons.add("more stages than the model has", f"pipeline={pipeline}: {most}")
                continue
            for context in divisors(devices // tensor // pipeline):
                data = devices // (tensor * pipeline * context)
                named = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data}
                if batch_size % data:
                    layout = Layout(**named)
                    text = f"{layout}: batch_size={batch_size} does not divide over data={data}"
                    reasons.add("the batch does not divide", text)
                    continue
                yield from _grouped(named, sizes, within, check, reasons)


def _grouped(
    named: dict[str, int],
    sizes: ModelSizes,
    within: int,
    check: Callable[[Layout], None],
    reasons: Reasons,
) -> Iterator[Layout]:
    """Yield the layouts with each number of expert ranks, without and with copies between nodes."""
    tokens = named["data"] * named["context"]
    near = gcd(tokens, max(1, within // named["tensor"]))
    copies = [1, tokens // near] if 1 < near < tokens else [1]
    experts = [n for n in divisors(tokens) if sizes.experts % n == 0] if sizes.experts else [1]
    for replicate in copies:
        for expert in experts:
            if tokens // replicate % expert:
                continue
            layout = Layout(**named, expert=expert, replicate=replicate)
            try:
                check(layout)
            except ParallelError as error:
                reasons.add("the engine refuses it", f"{layout}: {error}")
                continue
            yield layout
