"""Compare losses and gradients under layouts with a single process, in float64."""

from pathlib import Path
from typing import Any

from processes import run_processes

from ms_parallel.cluster.layout import Layout

RUNS = Path(__file__).parent / "context_runs.py"
# Sums of at most a few hundred float64 terms in a different order: measured 3e-15.
TOLERANCE = 1e-12
STRADDLING = [3, 1, 7, 2]
"""Document lengths in a row of 16: a single token, and a document across each split."""
LOSSES = {"balance", "balance_coefficient", "router_z_loss_coefficient"}
"""Options that also change the results of a single process."""


def job(layout: str, settings: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A job with 16 positions per row."""
    defaults = {"layout": layout, "settings": settings, "length": 16, "seed": 0}
    return {**defaults, "lengths": STRADDLING, **overrides}


def check(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Check that every job gives the loss and gradients of one process."""
    references: list[dict[str, Any]] = []
    for run in jobs:
        options = {name: value for name, value in run.get("options", {}).items() if name in LOSSES}
        reference = {**run, "layout": "data=1", "options": options}
        if reference not in references:
            references.append(reference)
        run["reference"] = references.index(reference)
    run_processes(1, RUNS, "references", jobs=references, folder=str(folder))
    for count in sorted({Layout.parse(run["layout"]).world_size for run in jobs}):
        runs = [run for run in jobs if Layout.parse(run["layout"]).world_size == count]
        of_ranks = run_processes(
            count,
            RUNS,
            "differences",
            timeout_s=300 + 60 * len(runs),  # eight processes on two busy cores
            jobs=runs,
            folder=str(folder),
        )
        for index, run in enumerate(runs):
            for results in of_ranks:
                assert len(results[index]) > 3
                for name, error in results[index].items():
                    assert error <= TOLERANCE, (run["layout"], run["settings"], name, error)
