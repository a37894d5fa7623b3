"""Step times predicted by the roofline, compared with published ones.

    python packages/ms-parallel/benchmarks/published_runs.py          # the tables of published.md
    python packages/ms-parallel/benchmarks/published_runs.py --fit    # fit the constants again
    python packages/ms-parallel/benchmarks/published_runs.py --swap   # with the halves swapped

Takes seconds on one core. Every second row of each source calibrates; the others are evaluated.
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
from published.rows import Run, excluded_rows, halves, read_runs

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
"""Prior of each constant: guess, and standard deviation of the logarithm."""
SPREAD = 0.07
"""Standard deviation of the logarithm of predicted over measured time, for the same weighting."""
ROUNDS, DAMPING = 25, 1e-3


@frozen(kw_only=True)
class Constants:
    """All constants by name."""

    values: Mapping[str, float]

    @property
    def passes(self) -> dict[str, float]:
        """Passes over memory of element-wise operators, by execution."""
        return {"fused": 1.0, "eager": self.values["eager"], "torch_npu": self.values["torch_npu"]}

    def of(self, family: str) -> Efficiency:
        """Constants of a family of chips."""
        values, ascend = self.values, "ascend " if family.startswith("ascend") else ""
        half = values.get(f"{family} products", values["h100 products"])
        attention = values[f"{family} attention"]
        return Efficiency(
            products={
                "bfloat16": half,
                "float16": half,
                "float8": values.get(f"{family} float8", half),
            },
            attention=attention,
            attention_backward=BACKWARD_SHARE * attention,
            memory=values[f"{ascend}memory"],
            traffic=values[f"{ascend}traffic"],
            node=values[f"{ascend}node"],
            hidden=min(1.0, values[f"{ascend}hidden"]),
            network=values["network"],
            waiting=values["waiting"],
            step_ms=values["step_ms"],
        )


def predict(run: Run, efficiency: Efficiency, passes: Mapping[str, float] = PASSES) -> StepTime:
    """Predicted step time of a published run."""
    settings = evolve(run.settings, passes=passes[run.operators])
    return step_time(run.sizes, run.layout, settings, run.cluster, efficiency)


def residuals(logarithms: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
    """Normalized residuals of all rows and all guesses."""
    constants = Constants(values=dict(zip(GUESSES, np.exp(logarithms).tolist(), strict=True)))
    efficiencies = {family: constants.of(family) for family in FAMILIES}
    rows = [
        log(predict(run, efficiencies[run.efficiency], constants.passes).total / run.seconds)
        / SPREAD
        for run in runs
    ]
    guesses = [
        (value - log(guess)) / spread
        for value, (guess, spread) in zip(logarithms.tolist(), GUESSES.values(), strict=True)
    ]
    return np.array(rows + guesses)


def fit(runs: Sequence[Run]) -> Constants:
    """Least-squares constants, by Gauss-Newton steps from the guesses."""
    at = np.log([guess for guess, _ in GUESSES.values()])
    for _ in range(ROUNDS):
        current = residuals(at, runs)
        jacobian = np.stack(
            [(residuals(at + step, runs) - current) / 1e-4 for step in 1e-4 * np.eye(len(at))],
            axis=1,
        )
        normal = jacobian.T @ jacobian + DAMPING * np.eye(len(at))
        at = at - np.linalg.solve(normal, jacobian.T @ current)
    return Constants(values=dict(zip(GUESSES, np.exp(at).tolist(), strict=True)))


def errors(
    runs: Sequence[Run],
    efficiencies: Mapping[str, Efficiency],
    passes: Mapping[str, float] = PASSES,
) -> list[float]:
    """Relative error of each run: predicted over measured, minus one."""
    return [
        predict(run, efficiencies[run.efficiency], passes).total / run.seconds - 1 for run in runs
    ]


def summary(title: str, run_errors: Sequence[float]) -> str:
    """A table row: number of runs, median, maximum, and number of errors above 25%."""
    sizes = [abs(error) for error in run_errors]
    outliers = sum(size > 0.25 for size in sizes)
    return f"| {title} | {len(run_errors)} | {median(sizes):.1%} | {max(sizes):.1%} | {outliers} |"


def tables(
    runs: Sequence[tuple[Run, bool]],
    efficiencies: Mapping[str, Efficiency],
    passes: Mapping[str, float] = PASSES,
) -> None:
    """Print the errors of each half and source, and each row."""
    print("| | rows | median | worst | beyond 25% |\n|---|---|---|---|---|")
    for title, half in (("calibration", True), ("evaluation", False)):
        of_half = [run for run, calibrates in runs if calibrates is half]
        print(summary(title, errors(of_half, efficiencies, passes)))
        for source in dict.fromkeys(run.source for run in of_half):
            of_source = [run for run in of_half if run.source == source]
            print(summary(f"{title}: {source}", errors(of_source, efficiencies, passes)))
    parts = [field.name for field in fields(StepTime)]
    print("\n| row | half | measured s | predicted s | error | shares of the prediction |")
    print("|---|---|---|---|---|---|")
    for run, calibrates in runs:
        predicted = predict(run, efficiencies[run.efficiency], passes)
        shares = {part: getattr(predicted, part) / predicted.total for part in parts}
        shown = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.01)
        half = "calibration" if calibrates else "evaluation"
        print(
            f"| {run.label} | {half} | {run.seconds:.4g} | {predicted.total:.4g}"
            f" | {predicted.total / run.seconds - 1:+.1%} | {shown} |"
        )
    print("\n| not predicted | why |\n|---|---|")
    for row, reason in excluded_rows().items():
        print(f"| {row} | {reason} |")


def main() -> None:
    """Print tables, or fit the constants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them")
    parser.add_argument("--swap", action="store_true", help="fit on the other half")
    options = parser.parse_args()
    runs = [(run, half is not options.swap) for run, half in halves(read_runs())]
    if not options.fit and not options.swap:
        tables(runs, FAMILIES)
        return
    constants = fit([run for run, calibrates in runs if calibrates])
    for name, value in constants.values.items():
        print(f"{name} = {value:.4g}")
    efficiencies = {family: constants.of(family) for family in FAMILIES}
    tables(runs, efficiencies, constants.passes)


if __name__ == "__main__":
    main()
