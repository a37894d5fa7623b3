"""The differential oracle: a model under drawn layouts, held against one process in float64."""

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
    """Run a small form of a model under drawn layouts, and hold all of it against one process.

    In float64, each weight's gradient and the loss are one process's within the tolerance, a
    changed token moves neither another document nor what stands before it, each document alone has
    the logits that it has in a packed row, a cache gives the tokens of whole forwards, and every
    layout saves the same folder.

    Args:
        model: a family, a folder, a transformers class, or `module:function`; see `open_subject`.
        processes: most of a layout; all run on this machine's processor.
        cases: ways of running it, the simplest of each kind first.
        seed: of weights, batch and draw.
        tolerance: allowed difference, as a share of the largest value; by default 1e-12, and 2e-6
            for a model that transformers builds, whose norms round to float32.
        done: called with each outcome as it is known.

    Raises:
        ConfigError: there is no such model.
        ModelError: the model cannot be built.
    """
    began = monotonic()
    subject = open_subject(model)
    tolerance = subject.tolerance if tolerance is None else tolerance
    reference = Case(layout="data=1", processes=1)
    chosen = draw_cases(processes, cases, seed, subject.experts)
    drawn = {0: reference, **dict(enumerate(chosen, 1))}
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        for size in sorted({case.processes for case in drawn.values()}):
            alike = {n: case for n, case in drawn.items() if case.processes == size}
            job = Job(subject=model, seed=seed, tolerance=tolerance, cases=alike)
            outcomes += run_cases(job, Path(name), done)
            if outcomes[0].refused or any(e.check == "run" for e in outcomes[0].found):
                break  # without a reference there is nothing to hold others against
    return Proof(
        model=model,
        shrunk=subject.shrunk,
        seed=seed,
        tolerance=tolerance,
        outcomes=tuple(outcomes),
        seconds=monotonic() - began,
    )
