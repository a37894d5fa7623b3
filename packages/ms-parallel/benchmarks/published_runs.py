"""Step times that the roofline predicts, beside published ones.

    python packages/ms-parallel/benchmarks/published_runs.py          # the tables of published.md
    python packages/ms-parallel/benchmarks/published_runs.py --fit    # the constants, found anew
    python packages/ms-parallel/benchmarks/published_runs.py --swap   # halves the other way round

Seconds of one core. Every other row of each source calibrates; the others judge.
"""

import argparse
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from statistics import median
from sys import path

import numpy as np
from attrs import evolve, fields, frozen

from ms_parallel.planner.roofline.calibrated import (
    BACKWARD_SHARE,
    FAMILIES,
    PASSES,
)
from ms_parallel.planner.roofline.efficiency import Efficiency
from ms_parallel.planner.roofline.step_time import StepTime, step_time

path.insert(0, str(Path(__file__).parent))
from published.rows import Run, excluded, halves, read_runs

GUESSES: Mapping[str, tuple[float, float]] = {
    "a100 products": (0.8, 0.1),
    "h100 products": (0.72, 0.1),
    "h100 float8": (0.65, 0.15),
    "h100-500w products": (0.6, 0.15),
    "h100-500w float8": (0.5, 0.2),
    "b200 float8": (0.65, 0.15),
    "ascend-910b products": (0.65, 0.15),
    "a100 attention": (0.55, 0.15),
    "h100 attention": (0.5, 0.15),
    "h100-500w attention": (0.4, 0.2),
    "b200 attention": (0.5, 0.15),
    "ascend-910b attention": (0.5, 0.2),
    "memory": (0.75, 0.15),
    "traffic": (0.7, 0.3),
    "node": (0.75, 0.15),
    "hidden": (0.8, 0.15),
    "ascend memory": (0.75, 0.15),
    "ascend traffic": (0.7, 0.5),
    "ascend node": (0.7, 0.3),
    "ascend hidden": (0.6, 0.5),
    "network": (0.75, 0.2),
    "waiting": (0.003, 0.5),
    "step_ms": (10.0, 1.0),
    "eager": (3.0, 0.3),
    "torch_npu": (2.0, 0.1),
}
"""Each constant as guessed beforehand, and how far its logarithm may well lie from that."""
SPREAD = 0.07
"""Spread of the logarithm of predicted over measured that is left, for the same weighing."""
ROUNDS, DAMPING = 25, 1e-3


@frozen(kw_only=True)
class Constants:
    """All constants, by name."""

    values: Mapping[str, float]

    @property
    def passes(self) -> dict[str, float]:
        """Passes over memory of element-wise steps, by how they run."""
        return {"fused": 1.0, "eager": self.values["eager"], "torch_npu": self.values["torch_npu"]}

    def of(self, family: str) -> Efficiency:
        """The constants of a family."""
        found, ascend = self.values, "ascend " if family.startswith("ascend") else ""
        half = found.get(f"{family} products", found["h100 products"])
        attention = found[f"{family} attention"]
        return Efficiency(
            products={
                "bfloat16": half,
                "float16": half,
                "float8": found.get(f"{family} float8", half),
            },
            attention=attention,
            attention_backward=BACKWARD_SHARE * attention,
            memory=found[f"{ascend}memory"],
            traffic=found[f"{ascend}traffic"],
            node=found[f"{ascend}node"],
            hidden=min(1.0, found[f"{ascend}hidden"]),
            network=found["network"],
            waiting=found["waiting"],
            step_ms=found["step_ms"],
        )


def predict(run: Run, efficiency: Efficiency, passes: Mapping[str, float] = PASSES) -> StepTime:
    """The time of a published run's step."""
    settings = evolve(run.settings, passes=passes[run.operators])
    return step_time(run.sizes, run.layout, settings, run.cluster, efficiency)


def residuals(logarithms: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
    """What is left of each row, and of each guess, in their spreads."""
    constants = Constants(values=dict(zip(GUESSES, np.exp(logarithms).tolist(), strict=True)))
    known = {family: constants.of(family) for family in FAMILIES}
    rows = [
        log(predict(run, known[run.efficiency], constants.passes).total / run.seconds) / SPREAD
        for run in runs
    ]
    guesses = [
        (value - log(guess)) / spread
        for value, (guess, spread) in zip(logarithms.tolist(), GUESSES.values(), strict=True)
    ]
    return np.array(rows + guesses)


def fit(runs: Sequence[Run]) -> Constants:
    """Constants of the least squares, by Gauss and Newton's steps from the guesses."""
    at = np.log([guess for guess, _ in GUESSES.values()])
    for _ in range(ROUNDS):
        left = residuals(at, runs)
        slopes = np.stack(
            [(residuals(at + step, runs) - left) / 1e-4 for step in 1e-4 * np.eye(len(at))], axis=1
        )
        normal = slopes.T @ slopes + DAMPING * np.eye(len(at))
        at = at - np.linalg.solve(normal, slopes.T @ left)
    return Constants(values=dict(zip(GUESSES, np.exp(at).tolist(), strict=True)))


def errors(
    runs: Sequence[Run], known: Mapping[str, Efficiency], passes: Mapping[str, float] = PASSES
) -> list[float]:
    """Predicted by measured, less one, of each run."""
    return [predict(run, known[run.efficiency], passes).total / run.seconds - 1 for run in runs]


def summary(title: str, found: Sequence[float]) -> str:
    """A line of a table: how many, the median, the worst, and how many are beyond a quarter."""
    sizes = [abs(each) for each in found]
    beyond = sum(each > 0.25 for each in sizes)
    return f"| {title} | {len(found)} | {median(sizes):.1%} | {max(sizes):.1%} | {beyond} |"


def tables(
    runs: Sequence[tuple[Run, bool]],
    known: Mapping[str, Efficiency],
    passes: Mapping[str, float] = PASSES,
) -> None:
    """Print how well each half and source is met, and each row."""
    print("| | rows | median | worst | beyond 25% |\n|---|---|---|---|---|")
    for title, half in (("calibrating", True), ("judging", False)):
        chosen = [run for run, calibrates in runs if calibrates is half]
        print(summary(title, errors(chosen, known, passes)))
        for source in dict.fromkeys(run.source for run in chosen):
            ours = [run for run in chosen if run.source == source]
            print(summary(f"{title}: {source}", errors(ours, known, passes)))
    parts = [each.name for each in fields(StepTime)]
    print("\n| row | half | measured s | predicted s | error | shares of the prediction |")
    print("|---|---|---|---|---|---|")
    for run, calibrates in runs:
        found = predict(run, known[run.efficiency], passes)
        shares = {part: getattr(found, part) / found.total for part in parts}
        shown = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.01)
        half = "calibrates" if calibrates else "judges"
        print(
            f"| {run.label} | {half} | {run.seconds:.4g} | {found.total:.4g}"
            f" | {found.total / run.seconds - 1:+.1%} | {shown} |"
        )
    print("\n| not predicted | why |\n|---|---|")
    for what, why in excluded().items():
        print(f"| {what} | {why} |")


def main() -> None:
    """Print tables, or constants found anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="find the constants anew, print them")
    parser.add_argument("--swap", action="store_true", help="find them on the other half, judge")
    chosen = parser.parse_args()
    runs = [(run, half is not chosen.swap) for run, half in halves(read_runs())]
    if not chosen.fit and not chosen.swap:
        tables(runs, FAMILIES)
        return
    found = fit([run for run, calibrates in runs if calibrates])
    for name, value in found.values.items():
        print(f"{name} = {value:.4g}")
    known = {family: found.of(family) for family in FAMILIES}
    tables(runs, known, found.passes)


if __name__ == "__main__":
    main()
