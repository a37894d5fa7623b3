"""Chooses the implementation that a call gets, and says why, as a pure function of the call.

Nothing is timed and nothing is remembered, so that every rank of a run takes the same one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from ms_kernels.contracts.call import Call, describe
from ms_kernels.core.entries import Entry
from ms_kernels.core.launches import Launch, TunedKernel, launch_of
from ms_kernels.core.tables import entry_for
from ms_kernels.errors import BackendError


@frozen(kw_only=True)
class Implementation:
    """One backend's way to perform one operator."""

    operator: str
    """Name of the contract it fulfils."""
    backend: str
    """Name of the backend, such as ``"cpu"``."""
    run: Callable[..., Any]
    """Takes the contract's arguments, then its options, all by position."""
    devices: frozenset[str] | None = None
    """Device types it runs on; None for any."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """Dtypes of the first argument that it takes; None for all that the contract allows."""
    subclasses: bool = False
    """Whether it takes DTensor and other tensor subclasses."""
    transforms: bool = False
    """Whether torch.func (grad, vmap, jvp, ...) and forward-mode AD can look into it."""
    refuses: Callable[[Call], str | None] = lambda call: None
    """Why it cannot or should not take a call, or None if it can."""
    merit: str
    """Why it is preferred to those after it."""
    version: int = 1
    """Raised when its results or its speed change: tuning tables of an older one then count for
    nothing."""
    pays_from: int = 0
    """Elements, of all arguments together, from which on it is worth while on a chip without a
    tuning table; 0 where it always is, and no tuner measures it."""
    tuned: tuple[TunedKernel, ...] = ()
    """Kernels whose launch parameters stand in tuning tables."""
    entries: Callable[[str, str], Iterable[Entry]] = lambda chip, dtype: ()
    """Kernels that a library for a GPU holds, from chip and dtype."""


@frozen(kw_only=True)
class Verdict:
    """What was decided about one implementation."""

    backend: str
    taken: bool
    reason: str


@frozen(kw_only=True)
class Choice:
    """The implementation that a call gets, with the reasons for and against each."""

    operator: str
    device: str
    dtype: str
    implementation: Implementation
    verdicts: tuple[Verdict, ...]
    """In the order in which they were considered."""
    launches: tuple[Launch, ...] = ()
    """What the kernels of the one taken run with, where `explain` was asked."""

    @property
    def backend(self) -> str:
        """Name of the backend taken."""
        return self.implementation.backend


def with_launches(choice: Choice, call: Call, dims: Mapping[str, int]) -> Choice:
    """Return `choice` with the parameters that its kernels run with.

    Args:
        choice: for `call`.
        call: already checked against its contract.
        dims: the sizes of its symbols.
    """
    launches = tuple(
        launch_of(each, call.chip, choice.dtype, tuple(dims[name] for name in each.sizes))
        for each in choice.implementation.tuned
    )
    return evolve(choice, launches=launches)


def first_fit(
    call: Call, implementations: Sequence[Implementation], preferred: Sequence[str] | None = None
) -> Implementation | None:
    """Return the first implementation that fits `call`: what `choose` takes, without the reasons.

    torch.compile traces this one without a graph break.
    """
    for candidate in _candidates(call.operator, implementations, preferred):
        if _objection(candidate, call, preferred) is None:
            return candidate
    return None


def choose(
    call: Call, implementations: Sequence[Implementation], preferred: Sequence[str] | None = None
) -> Choice:
    """Take the first implementation that fits `call`, and say why each was taken or not.

    Args:
        call: the use of an operator, already checked against its contract.
        implementations: those of the operator, best first; others' are passed over.
        preferred: backends to consider, in this order, instead of all of them.

    Raises:
        BackendError: when none fits; says why not, backend by backend.
    """
    candidates = _candidates(call.operator, implementations, preferred)
    offered = [each.backend for each in candidates]
    verdicts = [
        Verdict(backend=name, taken=False, reason=f"has no {call.operator}")
        for name in preferred or ()
        if name not in offered
    ]
    taken = None
    for candidate in candidates:
        obstacle = (
            f"{taken.backend} comes first" if taken else _objection(candidate, call, preferred)
        )
        if obstacle is None:
            taken = candidate
        reason = obstacle or candidate.merit
        verdicts.append(Verdict(backend=candidate.backend, taken=obstacle is None, reason=reason))
    if taken is None:
        reasons = "; ".join(f"{each.backend} {each.reason}" for each in verdicts)
        raise BackendError(
            f"{call.operator}: no backend takes this call on {call.device} in "
            f"{describe(call.dtype)} ({reasons}); `ms-kernels list` shows what exists"
        )
    return Choice(
        operator=call.operator,
        device=str(call.device),
        dtype=describe(call.dtype),
        implementation=taken,
        verdicts=tuple(verdicts),
    )


def _candidates(
    operator: str, implementations: Sequence[Implementation], preferred: Sequence[str] | None
) -> list[Implementation]:
    """Return the implementations to consider, in order."""
    own = [each for each in implementations if each.operator == operator]
    if preferred is None:
        return own
    return [each for name in preferred for each in own if each.backend == name]


def _objection(
    candidate: Implementation, call: Call, preferred: Sequence[str] | None
) -> str | None:
    """Say why `candidate` is not taken, or None; one that was asked for is taken even if slower."""
    obstacle = obstacle_to(candidate, call)
    return obstacle if obstacle is not None or preferred else _too_small(candidate, call)


def obstacle_to(candidate: Implementation, call: Call) -> str | None:
    """Say why `candidate` cannot take `call`, or None if it can."""
    if candidate.devices is not None and call.device.type not in candidate.devices:
        return f"runs on {' and '.join(sorted(candidate.devices))}, not on {call.device.type}"
    if candidate.dtypes is not None and call.dtype not in candidate.dtypes:
        fits = ", ".join(describe(dtype) for dtype in candidate.dtypes)
        return f"takes {fits}, not {describe(call.dtype)}"
    if not candidate.subclasses and not all(each is None or each.plain for each in call.tensors):
        return "takes plain tensors, not DTensor or another subclass"
    if call.transformed and not candidate.transforms:
        return "is opaque to torch.func and forward-mode differentiation"
    return candidate.refuses(call)


def _too_small(candidate: Implementation, call: Call) -> str | None:
    """Say why `candidate` would be slower than what comes after it, or None if it pays."""
    entry = None
    if candidate.backend != "reference":
        dtype = describe(call.dtype)
        entry = entry_for(call.chip, call.operator, candidate.backend, candidate.version, dtype)
    pays_from = candidate.pays_from if entry is None else entry.pays_from
    if pays_from is None:
        return f"pays from no size that was tried on {call.chip}"
    if call.elements < pays_from:
        source = "" if entry is None else f" ({call.chip})"
        return f"pays from {pays_from} elements on{source}, and here are {call.elements}"
    return None
