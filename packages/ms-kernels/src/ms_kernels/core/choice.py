"""Chooses the implementation for a call, with reasons, as a pure function of the call.

Nothing is timed or remembered, so every rank of a run makes the same choice.
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
    """One backend's implementation of one operator."""

    operator: str
    """Name of the operator's contract."""
    backend: str
    """Name of the backend, such as ``"cpu"``."""
    run: Callable[..., Any]
    """Function of the contract's arguments, then its options, all positional."""
    devices: frozenset[str] | None = None
    """Supported device types. None: any."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """Supported dtypes of the first argument. None: all that the contract allows."""
    subclasses: bool = False
    """Whether it supports DTensor and other tensor subclasses."""
    transforms: bool = False
    """Whether torch.func (grad, vmap, jvp, ...) and forward-mode AD can trace through it."""
    refuses: Callable[[Call], str | None] = lambda call: None
    """Reason why it does not support a call, or None if it does."""
    merit: str
    """Why it is preferred to the implementations after it."""
    version: int = 1
    """Version of its results and speed. Tuning table entries for another version are ignored."""
    pays_from: int = 0
    """Total elements of all arguments from which it is faster than the next implementation, on a
    chip without a tuning table. 0: always, and tuners do not measure it."""
    tuned: tuple[TunedKernel, ...] = ()
    """Kernels whose launch parameters are in tuning tables."""
    entries: Callable[[str, str], Iterable[Entry]] = lambda chip, dtype: ()
    """Kernels for an ahead-of-time compiled GPU library, given chip and dtype."""


@frozen(kw_only=True)
class Verdict:
    """Decision about one implementation, with its reason."""

    backend: str
    taken: bool
    reason: str


@frozen(kw_only=True)
class Choice:
    """Chosen implementation of a call, with a verdict on every candidate."""

    operator: str
    device: str
    dtype: str
    implementation: Implementation
    verdicts: tuple[Verdict, ...]
    """One per candidate, in the order considered."""
    launches: tuple[Launch, ...] = ()
    """Launch parameters of the chosen implementation's kernels; filled in by `explain` only."""

    @property
    def backend(self) -> str:
        """Name of the chosen backend."""
        return self.implementation.backend


def with_launches(choice: Choice, call: Call, dims: Mapping[str, int]) -> Choice:
    """Return `choice` with the launch parameters of its kernels.

    Args:
        choice: the choice made for `call`.
        call: the call, already checked against its contract.
        dims: size of each symbol in the call.
    """
    launches = tuple(
        launch_of(kernel, call.chip, choice.dtype, tuple(dims[name] for name in kernel.sizes))
        for kernel in choice.implementation.tuned
    )
    return evolve(choice, launches=launches)


def first_fit(
    call: Call, implementations: Sequence[Implementation], preferred: Sequence[str] | None = None
) -> Implementation | None:
    """Return the first implementation that supports `call`: the one `choose` picks.

    It gathers no reasons, so that torch.compile can trace it without a graph break.
    """
    for candidate in _candidates(call.operator, implementations, preferred):
        if _objection(candidate, call, preferred) is None:
            return candidate
    return None


def choose(
    call: Call, implementations: Sequence[Implementation], preferred: Sequence[str] | None = None
) -> Choice:
    """Choose the first implementation that supports `call`, with a verdict on each candidate.

    Args:
        call: the call, already checked against its contract.
        implementations: candidates, best first; those of other operators are ignored.
        preferred: backends to consider, in this order, instead of all.

    Raises:
        BackendError: if none supports the call; the message gives each backend's reason.
    """
    candidates = _candidates(call.operator, implementations, preferred)
    backends = [candidate.backend for candidate in candidates]
    verdicts = [
        Verdict(backend=name, taken=False, reason=f"has no {call.operator}")
        for name in preferred or ()
        if name not in backends
    ]
    implementation = None
    for candidate in candidates:
        if implementation is None:
            objection = _objection(candidate, call, preferred)
        else:
            objection = f"{implementation.backend} comes first"
        if objection is None:
            implementation = candidate
        reason = objection or candidate.merit
        verdicts.append(Verdict(backend=candidate.backend, taken=objection is None, reason=reason))
    if implementation is None:
        reasons = "; ".join(f"{verdict.backend} {verdict.reason}" for verdict in verdicts)
        raise BackendError(
            f"{call.operator}: no backend supports this call on {call.device} in "
            f"{describe(call.dtype)} ({reasons}); `ms-kernels list` shows all implementations"
        )
    return Choice(
        operator=call.operator,
        device=str(call.device),
        dtype=describe(call.dtype),
        implementation=implementation,
        verdicts=tuple(verdicts),
    )


def _candidates(
    operator: str, implementations: Sequence[Implementation], preferred: Sequence[str] | None
) -> list[Implementation]:
    """Return the implementations to consider, in order."""
    matching = [candidate for candidate in implementations if candidate.operator == operator]
    if preferred is None:
        return matching
    return [candidate for name in preferred for candidate in matching if candidate.backend == name]


def _objection(
    candidate: Implementation, call: Call, preferred: Sequence[str] | None
) -> str | None:
    """Reason not to use `candidate`, or None. A forced backend is used even if it is slower."""
    reason = obstacle_to(candidate, call)
    return reason if reason is not None or preferred else _too_small(candidate, call)


def obstacle_to(candidate: Implementation, call: Call) -> str | None:
    """Reason why `candidate` does not support `call`, or None if it does."""
    if candidate.devices is not None and call.device.type not in candidate.devices:
        return f"runs on {' and '.join(sorted(candidate.devices))}, not on {call.device.type}"
    if candidate.dtypes is not None and call.dtype not in candidate.dtypes:
        dtypes = ", ".join(describe(dtype) for dtype in candidate.dtypes)
        return f"supports {dtypes}, not {describe(call.dtype)}"
    plain = all(tensor is None or tensor.plain for tensor in call.tensors)
    if not candidate.subclasses and not plain:
        return "supports plain tensors, not DTensor or another subclass"
    if call.transformed and not candidate.transforms:
        return "is opaque to torch.func and forward-mode differentiation"
    return candidate.refuses(call)


def _too_small(candidate: Implementation, call: Call) -> str | None:
    """Reason why `candidate` is slower than the next one at this size, or None if it is faster."""
    entry = None
    if candidate.backend != "reference":
        dtype = describe(call.dtype)
        entry = entry_for(call.chip, call.operator, candidate.backend, candidate.version, dtype)
    pays_from = candidate.pays_from if entry is None else entry.pays_from
    if pays_from is None:
        return f"was not faster at any size measured on {call.chip}"
    if call.elements < pays_from:
        source = "" if entry is None else f" on {call.chip}"
        return f"is faster from {pays_from} elements{source}, and this call has {call.elements}"
    return None
