"""Cases, outcomes and proofs, as sent between processes and printed by `--json`."""

from typing import Literal

import msgspec

from ms_parallel.split.context.kinds import ContextKind

Check = Literal[
    "gradients", "loss", "logits", "leak", "causality", "packing", "generation", "folder", "run"
]
"""Checks: `leak` between documents, `packing` of documents against single rows, `folder` for the
saved weights, `run` for processes that fail or hang."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A layout and options to run the model with."""

    layout: str
    """Text in the form of `Layout.parse`."""
    processes: int
    schedule: str = "1f1b"
    microbatch_size: int | None = None
    recompute: str = "none"
    context_attention: ContextKind = "auto"

    @property
    def text(self) -> str:
        """The case on one line, with the options that differ from their defaults."""
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
    """Work for one launch of processes."""

    subject: str
    seed: int
    tolerance: float
    cases: dict[int, Case]
    """Cases by number; number 0 is the reference for all others."""


class Counterexample(msgspec.Struct, frozen=True, kw_only=True):
    """A result that differs from one process's."""

    check: Check
    what: str
    """Description in one sentence."""
    parameter: str = ""
    layer: int | None = None
    ratio: str = ""
    """Constant ratio of the result to the reference, if it is one: `1/data`, `0`, ..."""
    apart: float = 0.0
    """Largest difference relative to the largest reference value."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a case."""

    case: Case
    refused: str = ""
    """Reason why the layout is refused; empty if it runs."""
    checks: tuple[Check, ...] = ()
    """Checks that were made."""
    compared: int = 0
    """Number of gradients that were compared, over all ranks."""
    apart: float = 0.0
    """Largest difference of a gradient relative to the largest value of its reference."""
    found: tuple[Counterexample, ...] = ()


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of all cases of a model."""

    model: str
    shrunk: str
    """Description of the small model that was run."""
    seed: int
    tolerance: float
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def refused(self) -> str:
        """Reason why the model does not even run on one process; empty if it does."""
        return self.outcomes[0].refused

    @property
    def holds(self) -> bool:
        """Whether the model runs without a counterexample."""
        return not self.refused and not any(outcome.found for outcome in self.outcomes)

    @property
    def smallest(self) -> tuple[Case, Counterexample] | None:
        """The simplest failed case and its first counterexample; None if all cases hold."""
        failed = [outcome for outcome in self.outcomes if outcome.found]
        if not failed:
            return None
        first = min(failed, key=lambda outcome: _size(outcome.case))
        return first.case, first.found[0]


def _size(case: Case) -> tuple[int, int, int]:
    changed = (case.schedule != "1f1b") + (case.microbatch_size is not None)
    return case.processes, case.layout.count("=") + (case.recompute != "none"), changed
