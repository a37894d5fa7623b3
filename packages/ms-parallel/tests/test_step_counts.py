"""Kernels, copies, collectives and host synchronizations of one optimizer step.

They are counted on an emulated accelerator, which shows copies to and from the host. The model has
two layers. `step_counts.json` has the counts of each kind of layout; after a change that lowers
one, or that has a reason to raise one, write it again with `python tests/test_step_counts.py`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ms_rig import run_on_rig

RUNS = Path(__file__).parent / "step_runs.py"
TABLE = Path(__file__).parent / "step_counts.json"
OF_TORCH = ("kernels", "copies")
"""Counts that depend on the version of torch."""


def table() -> dict[str, Any]:
    """Read the table: the version of torch, and rows with a job and its counts."""
    contents: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return contents


def count(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the rows' jobs again, with the kernels and copies of rank 0."""
    results: dict[int, Any] = {}
    for processes in (1, 2):
        jobs = {
            index: {key: row[key] for key in ("layout", "family", "engine")}
            for index, row in enumerate(rows)
            if row["processes"] == processes
        }
        first, *others = run_on_rig(processes, RUNS, "count_steps", jobs=list(jobs.values()))
        results |= dict(zip(jobs, first, strict=True))
        for counts in others:
            assert without(OF_TORCH, counts) == without(OF_TORCH, first)
    return [{**row, "counts": results[index]} for index, row in enumerate(rows)]


def without(names: Sequence[str], counts: list[dict[str, int]]) -> list[dict[str, int]]:
    """Drop some counts."""
    return [{name: n for name, n in row.items() if name not in names} for row in counts]


def test_a_step_has_the_kernels_copies_collectives_and_synchronizations_of_the_table() -> None:
    """Every count is exact, so that nothing is added to a step unnoticed."""
    expected = table()
    ignored = () if torch.__version__.startswith(expected["torch"]) else OF_TORCH
    measured = count(expected["steps"])
    pairs = ([row["counts"] for row in rows] for rows in (measured, expected["steps"]))
    names = [row["about"] for row in measured]
    results, recorded = (dict(zip(names, without(ignored, part), strict=True)) for part in pairs)
    assert results == recorded


@pytest.mark.parametrize("row", table()["steps"], ids=lambda row: row["about"])
def test_the_host_waits_once_a_step_and_after_the_optimizer_is_queued(row: dict[str, Any]) -> None:
    """The optimizer waits only for sizes of messages between experts, and for an audit."""
    counts, engine = row["counts"], row["engine"]
    if "audit_every" in engine:
        assert counts["host sync"] == counts["host sync before optimizer"] == 2
        return
    microbatches = 2 if row["processes"] == 2 else 1
    messages = microbatches * 2 if "expert" in row["layout"] else 0  # two layers
    assert counts["host sync before optimizer"] == messages
    assert counts["host sync"] == messages + 1


def test_the_device_decides_and_clips_as_the_host_does() -> None:
    """Skipped steps, weights and moments are equal; with clipping up to rounding."""
    norms = (100.0, 0.2)  # clips nothing; clips every step
    jobs = [{"queued": queued, "max_grad_norm": norm} for norm in norms for queued in (True, False)]
    (runs,) = run_on_rig(1, RUNS, "decided_updates", jobs=jobs)
    for queued in runs[::2]:
        skipped = [report[0] for report in queued["reports"]]
        assert skipped == [None, "refused", None, "nonfinite", "refused", "nonfinite", None]
        assert queued["updates"] == 3
    assert str(runs[0]) == str(runs[1])  # as text, since NaN is not equal to itself
    queued, waited = runs[2:]
    assert min(report[2] for report in queued["reports"][::2]) > norms[1]
    state, expected = (torch.tensor(run["state"], dtype=torch.float64) for run in (queued, waited))
    # A division by norm / limit instead of a product with limit / norm: 2^-23 of a gradient.
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    contents = table()
    rows = ",\n".join(json.dumps(row) for row in count(contents["steps"]))
    version = ".".join(torch.__version__.split(".")[:2])
    TABLE.write_text(f'{{"torch": "{version}", "steps": [\n{rows}\n]}}\n', encoding="utf-8")
