"""Holds losses and gradients under layouts against those of one process, in float64."""

from pathlib import Path
from typing import Any

from processes import run_processes

from ms_parallel.cluster.layout import Layout

RUNS = Path(__file__).parent / "context_runs.py"
# Sums of at most some hundred float64 terms taken in another order: measured 3e-15.
TOLERANCE = 1e-12
STRADDLING = [3, 1, 7, 2]
"""Lengths of documents in a row of 16: one of a single token, and one on both sides of each cut."""
LOSSES = {"balance", "balance_coefficient", "router_z_loss_coefficient"}
"""Options that change what one process computes."""


def job(layout: str, settings: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """A job of 16 positions a row."""
    whole = {"layout": layout, "settings": settings, "length": 16, "seed": 0}
    return {**whole, "lengths": STRADDLING, **rest}


def check(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Every job gives the loss and gradients of one process."""
    known: list[dict[str, Any]] = []
    for each in jobs:
        kept = {name: value for name, value in each.get("options", {}).items() if name in LOSSES}
        one = {**each, "layout": "data=1", "options": kept}
        if one not in known:
            known.append(one)
        each["reference"] = known.index(one)
    run_processes(1, RUNS, "references", jobs=known, folder=str(folder))
    for count in sorted({Layout.parse(each["layout"]).world_size for each in jobs}):
        chosen = [each for each in jobs if Layout.parse(each["layout"]).world_size == count]
        of_ranks = run_processes(
            count,
            RUNS,
            "differences",
            timeout_s=300 + 60 * len(chosen),  # of eight on two cores with others beside them
            jobs=chosen,
            folder=str(folder),
        )
        for number, each in enumerate(chosen):
            for found in of_ranks:
                assert len(found[number]) > 3
                for name, apart in found[number].items():
                    assert apart <= TOLERANCE, (each["layout"], each["settings"], name, apart)
