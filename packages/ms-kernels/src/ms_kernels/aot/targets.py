"""Chips that a library can be built for, on any machine."""

from attrs import frozen

from ms_kernels.errors import BackendError


@frozen(kw_only=True)
class Target:
    """Target chip, in the terms of Triton's compiler."""

    name: str
    """Name of the target, such as ``"sm_90"``."""
    backend: str
    """``"cuda"``, ``"hip"`` or ``"cpu"``."""
    architecture: int | str = 0
    """Compute capability times ten, or AMD's name of the architecture."""
    lanes: int = 1
    """Threads per warp."""
    suffix: str = ""
    """File suffix of a compiled kernel."""


def _nvidia(capability: int) -> Target:
    name = f"sm_{capability}"
    return Target(name=name, backend="cuda", architecture=capability, lanes=32, suffix="cubin")


TARGETS = {
    target.name: target
    for target in (
        *(_nvidia(capability) for capability in (80, 89, 90, 100)),
        Target(name="gfx942", backend="hip", architecture="gfx942", lanes=64, suffix="hsaco"),
        Target(name="cpu", backend="cpu", suffix="pt2"),
    )
}
"""All targets by name."""


def target_named(name: str) -> Target:
    """Return the target with the given name.

    Raises:
        BackendError: unknown target; the message lists all targets.
    """
    if name not in TARGETS:
        raise BackendError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]
