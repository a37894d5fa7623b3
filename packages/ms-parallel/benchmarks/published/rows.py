"""Published runs: each row of runs.csv with its model, machine, layout and settings."""

import csv
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.roofline.known_cluster import known_cluster
from ms_parallel.planner.roofline.settings import RECOMPUTE, Overlap, RecomputedShares, StepSettings
from ms_parallel.planner.roofline.shape import DecoderSizes, ExpertSizes, LatentSizes

HERE = Path(__file__).parent
REPEATED: Mapping[str, RecomputedShares] = {
    "none": RECOMPUTE["none"],
    "selective": RECOMPUTE["selective"],
    "full": RECOMPUTE["full"],
    "core": RecomputedShares(attention=1.0),
    "alternate": RecomputedShares(products=0.5, attention=0.5, elementwise=0.5),
    "operators": RecomputedShares(products=0.5, elementwise=1.0),
    "five of 32 layers": RecomputedShares(products=5 / 32, attention=5 / 32, elementwise=5 / 32),
}
"""Shares of recomputed work: `core` is from Korthikanti et al., torchtitan's `operators` saves
attention and every other product, `alternate` is every second layer."""


@frozen(kw_only=True)
class Run:
    """A published row."""

    source: str
    name: str
    model: str
    system: str
    stack: str
    sizes: DecoderSizes
    layout: Layout
    settings: StepSettings
    cluster: Cluster
    efficiency: str
    """Family of chips whose constants apply."""
    operators: str
    """Element-wise operators: `fused`, `eager` (unfused), or `torch_npu` (partly fused)."""
    seconds: float
    """Measured seconds per step."""

    @property
    def label(self) -> str:
        """Unique description of the row."""
        layout = self.layout
        return (
            f"{self.source}: {self.name}, {self.model}, {layout.world_size} devices,"
            f" t{layout.tensor} c{layout.context} p{layout.pipeline}"
            f" v{self.settings.virtual_stages} s{self.settings.sequence},"
            f" {self.stack}"
        )


@cache
def tables() -> dict[str, Any]:
    """Models, systems and stacks of systems.toml."""
    return tomllib.loads((HERE / "systems.toml").read_text())


def read_runs() -> tuple[Run, ...]:
    """All rows, in the order of the file."""
    with (HERE / "runs.csv").open(newline="") as file:
        return tuple(_run(row) for row in csv.DictReader(file))


def halves(runs: tuple[Run, ...]) -> Iterator[tuple[Run, bool]]:
    """Each run, and whether it belongs to the calibration half.

    In each source that is every second row, starting with the second, so a source with a single row
    is only used for evaluation.
    """
    indices: dict[str, int] = {}
    for run in runs:
        index = indices[run.source] = indices.get(run.source, -1) + 1
        yield run, index % 2 == 1


def _run(row: Mapping[str, str]) -> Run:
    stack = dict(tables()["stacks"][row["stack"]])
    system = tables()["systems"][row["system"]]
    sizes = sizes_of(tables()["models"][row["model"]])
    number = {key: int(row[key]) for key in ("devices", "tensor", "context", "pipeline", "expert")}
    data = number["devices"] // (number["tensor"] * number["context"] * number["pipeline"])
    layout = Layout(
        data=data,
        tensor=number["tensor"],
        context=number["context"],
        pipeline=number["pipeline"],
        expert=number["expert"],
    )
    operators = stack.pop("operators", "fused")
    stages = tables()["stage_layers"].get(row["name"])
    settings = StepSettings(
        sequence=int(row["sequence"]),
        rows=int(row["rows"]),
        microbatches=int(row["batch"]) // (data * int(row["rows"])),
        virtual_stages=int(row["virtual"]),
        stage_layers=None if stages is None else tuple(stages),
        repeated=REPEATED[stack.pop("repeated", "none")],
        overlap=Overlap(**stack.pop("overlap", {})),
        **stack,
    )
    return Run(
        source=row["source"],
        name=row["name"],
        model=row["model"],
        system=row["system"],
        stack=row["stack"],
        sizes=sizes,
        layout=layout,
        settings=settings,
        cluster=cluster_of(system, number["devices"]),
        efficiency=system["efficiency"],
        operators=operators,
        seconds=_seconds(row, sizes),
    )


def sizes_of(model: Mapping[str, Any]) -> DecoderSizes:
    """Sizes of a model; by default heads split the hidden size and have their own keys."""
    sizes = dict(model)
    sizes.setdefault("key_value_heads", sizes["heads"])
    sizes.setdefault("head_dim", sizes["hidden"] // sizes["heads"])
    if "latents" in sizes:
        sizes["latents"] = LatentSizes(**sizes["latents"])
    if "experts" in sizes:
        sizes["experts"] = ExpertSizes(**sizes["experts"])
    return DecoderSizes(**sizes)


def cluster_of(system: Mapping[str, Any], devices: int) -> Cluster:
    """A cluster of `devices` devices of a system."""
    cluster = known_cluster(system["chip"], devices, network_gb_per_s=system["network"])
    memory = system.get("memory_gb_per_s", cluster.memory_bandwidth_gb_per_s)
    return evolve(cluster, memory_bandwidth_gb_per_s=float(memory))


def _seconds(row: Mapping[str, str], sizes: DecoderSizes) -> float:
    """Step time from the figure of the source."""
    value, devices = float(row["value"]), int(row["devices"])
    sequence = int(row["sequence"])
    tokens = int(row["batch"]) * sequence
    if row["metric"] == "seconds":
        return value
    if row["metric"] == "tokens_per_s":
        return tokens / (value * devices)
    if row["metric"] == "hours_per_1e12_tokens":
        return tokens / 1e12 * value * 3600 / devices
    if row["metric"] == "causal_tflops":
        return tokens * sizes.token_flops(sequence, causal=True) / (value * 1e12 * devices)
    # Narayanan et al. 2021, equation 3, which includes the recomputed forward pass.
    layers, hidden = sizes.layers, sizes.hidden
    terms = 1 + sequence / (6 * hidden) + sizes.vocabulary / (16 * layers * hidden)
    return 96 * tokens * layers * hidden**2 * terms / (value * 1e12 * devices)


def excluded_rows() -> dict[str, str]:
    """Rows of the sources that are left out, with the reasons."""
    return dict(tables()["excluded"])
