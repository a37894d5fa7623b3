"""Published runs as values: each row of runs.csv with its model, machine, layout and settings."""

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
"""What is computed again: `core` of Korthikanti et al., `operators` of torchtitan keeps attention
and every other product, `alternate` is each second layer."""


@frozen(kw_only=True)
class Run:
    """One published row."""

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
    """The family whose constants count."""
    operators: str
    """How element-wise steps run: `fused`, `eager` one by one, `torch_npu` some of them fused."""
    seconds: float
    """Seconds of a step, as measured."""

    @property
    def label(self) -> str:
        """What tells it from the others."""
        layout = self.layout
        return (
            f"{self.source}: {self.name}, {self.model}, {layout.world_size} devices,"
            f" t{layout.tensor} c{layout.context} p{layout.pipeline}"
            f" v{self.settings.virtual_stages} s{self.settings.sequence},"
            f" {self.stack}"
        )


@cache
def tables() -> dict[str, Any]:
    """Models, systems and stacks."""
    return tomllib.loads((HERE / "systems.toml").read_text())


def read_runs() -> tuple[Run, ...]:
    """All rows, in the order of the file."""
    with (HERE / "runs.csv").open(newline="") as file:
        return tuple(_run(row) for row in csv.DictReader(file))


def halves(runs: tuple[Run, ...]) -> Iterator[tuple[Run, bool]]:
    """Each run, and whether it is of the half that calibrates.

    Of each source these are every other row in the order of its table, from the second one on, so
    that a source with one row is judged alone.
    """
    seen: dict[str, int] = {}
    for run in runs:
        place = seen[run.source] = seen.get(run.source, -1) + 1
        yield run, place % 2 == 1


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
    """A model's sizes; heads share out the hidden width and have own keys, unless said."""
    given = dict(model)
    given.setdefault("key_value_heads", given["heads"])
    given.setdefault("head_dim", given["hidden"] // given["heads"])
    if "latents" in given:
        given["latents"] = LatentSizes(**given["latents"])
    if "experts" in given:
        given["experts"] = ExpertSizes(**given["experts"])
    return DecoderSizes(**given)


def cluster_of(system: Mapping[str, Any], devices: int) -> Cluster:
    """So many devices of a system."""
    found = known_cluster(system["chip"], devices, network_gb_per_s=system["network"])
    memory = system.get("memory_gb_per_s", found.memory_bandwidth_gb_per_s)
    return evolve(found, memory_bandwidth_gb_per_s=float(memory))


def _seconds(row: Mapping[str, str], sizes: DecoderSizes) -> float:
    """A step's time from what the source states."""
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
    # Narayanan et al. 2021, equation 3, which counts the forward that is computed again.
    layers, hidden = sizes.layers, sizes.hidden
    terms = 1 + sequence / (6 * hidden) + sizes.vocabulary / (16 * layers * hidden)
    return 96 * tokens * layers * hidden**2 * terms / (value * 1e12 * devices)


def excluded() -> dict[str, str]:
    """Rows of the sources that are not among ours, each with the reason."""
    return dict(tables()["excluded"])
