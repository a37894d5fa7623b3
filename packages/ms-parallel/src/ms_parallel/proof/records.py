"""What is drawn, found and proved, as it travels between processes and into `--json`."""

from typing import Literal

import msgspec

from ms_parallel.split.context.kinds import ContextKind

Check = Literal[
    "gradients", "loss", "logits", "leak", "causality", "packing", "generation", "folder", "run"
]
"""What did not hold: `leak` between documents, `packing` beside the documents alone, `folder`
between what was saved and what is read, `run` where a process failed or hung."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One way of running the model."""

    layout: str
    """As `Layout.parse` reads it."""
    processes: int
    schedule: str = "1f1b"
    microbatch_size: int | None = None
    recompute: str = "none"
    context_attention: ContextKind = "auto"

    @property
    def text(self) -> str:
        """The case in a line, with what differs from the default."""
        parts = [self.layout]
        if self.schedule != "1f1b":
            parts.append(f"schedule={self.schedule}")
        if self.microbatch_size is not None:
            parts.append(f"microbatch_size={self.microbatch_size}")
        if self.recompute != "none":
            parts.append(f"recompute={self.recompute}")
        if self.context_attention != "auto":
            parts.append(f"context_attention={self.context_attention}")
        return ", ".join(parts)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of one start do."""

    subject: str
    seed: int
    tolerance: float
    cases: dict[int, Case]
    """By number; number 0 is the reference, against which all others are held."""


class Counterexample(msgspec.Struct, frozen=True, kw_only=True):
    """What a case computes otherwise than one process."""

    check: Check
    what: str
    """One sentence."""
    parameter: str = ""
    layer: int | None = None
    ratio: str = ""
    """Ratio of what was found to what is right, where it is one number: `1/data`, `0`, ..."""
    apart: float = 0.0
    """Largest difference, as a share of the largest right value."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one case."""

    case: Case
    refused: str = ""
    """Why the model cannot run so, in the words of the refusal."""
    checks: tuple[Check, ...] = ()
    """What was checked."""
    compared: int = 0
    """Weights whose gradients were compared."""
    apart: float = 0.0
    """Largest difference of a gradient, as a share of the largest of its weight."""
    found: tuple[Counterexample, ...] = ()


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was proved of a model, or what disproves it."""

    model: str
    shrunk: str
    """The small model that was run."""
    seed: int
    tolerance: float
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def refused(self) -> str:
        """Why the model runs in no process, so that nothing was proved; empty where it runs."""
        return self.outcomes[0].refused

    @property
    def holds(self) -> bool:
        """Whether it runs, and nothing was found."""
        return not self.refused and not any(outcome.found for outcome in self.outcomes)

    @property
    def smallest(self) -> tuple[Case, Counterexample] | None:
        """The counterexample of the simplest case, if there is any."""
        failed = [outcome for outcome in self.outcomes if outcome.found]
        if not failed:
            return None
        first = min(failed, key=lambda outcome: _size(outcome.case))
        return first.case, first.found[0]


def _size(case: Case) -> tuple[int, int, int]:
    changed = (case.schedule != "1f1b") + (case.microbatch_size is not None)
    return case.processes, case.layout.count("=") + (case.recompute != "none"), changed
