"""Differential oracle: compares a model under random layouts with one process, in float64."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from ms_parallel.proof.draw import draw_cases
from ms_parallel.proof.launch import run_cases
from ms_parallel.proof.records import Case, Job, Outcome, Proof
from ms_parallel.proof.subject import open_subject


def prove(
    model: str,
    *,
    processes: int = 4,
    cases: int = 16,
    seed: int = 0,
    tolerance: float | None = None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> Proof:
    """Run a small version of a model under random layouts and compare it with one process.

    All of this is checked in float64, within the tolerance: the loss and every gradient equal those
    of one process; a changed token changes neither other documents nor earlier tokens; a document
    has the same logits alone and packed; generation with a cache equals full forward passes; and
    every layout saves the same folder.

    Args:
        model: architecture, folder, transformers class, or `module:function`; see `open_subject`.
        processes: maximum processes of a layout; all run on this machine's CPU.
        cases: number of cases, the simplest of each kind first.
        seed: seed of weights, batch and cases.
        tolerance: allowed difference relative to the largest value. None: 1e-12, or 2e-6 for
            models of transformers, whose norms round to float32.
        done: called with each outcome.

    Raises:
        ConfigError: the model does not exist.
        ModelError: the model cannot be built.
    """
    started = monotonic()
    subject = open_subject(model)
    tolerance = subject.tolerance if tolerance is None else tolerance
    reference = Case(layout="data=1", processes=1)
    generated = draw_cases(processes, cases, seed, subject.experts)
    numbered = {0: reference, **dict(enumerate(generated, 1))}
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        # Ascending, so the reference, which needs one process, runs first.
        for size in sorted({case.processes for case in numbered.values()}):
            same_size = {n: case for n, case in numbered.items() if case.processes == size}
            job = Job(subject=model, seed=seed, tolerance=tolerance, cases=same_size)
            outcomes += run_cases(job, Path(name), done)
            if outcomes[0].refused or any(e.check == "run" for e in outcomes[0].found):
                break  # without a reference there is nothing to compare with
    return Proof(
        model=model,
        shrunk=subject.shrunk,
        seed=seed,
        tolerance=tolerance,
        outcomes=tuple(outcomes),
        seconds=monotonic() - started,
    )
