"""The chips that a library can be built for; none of them need be here."""

from attrs import frozen

from ms_kernels.errors import BackendError


@frozen(kw_only=True)
class Target:
    """One chip, as Triton's compiler names it."""

    name: str
    """The target's name, such as ``"sm_90"``."""
    backend: str
    """``"cuda"``, ``"hip"`` or ``"cpu"``."""
    architecture: int | str = 0
    """Compute capability times ten, or AMD's name."""
    lanes: int = 1
    """Threads of a warp."""
    suffix: str = ""
    """Ending of a compiled kernel's file."""


def _nvidia(capability: int) -> Target:
    name = f"sm_{capability}"
    return Target(name=name, backend="cuda", architecture=capability, lanes=32, suffix="cubin")


TARGETS = {
    each.name: each
    for each in (
        *(_nvidia(capability) for capability in (80, 89, 90, 100)),
        Target(name="gfx942", backend="hip", architecture="gfx942", lanes=64, suffix="hsaco"),
        Target(name="cpu", backend="cpu", suffix="pt2"),
    )
}
"""Every target by name."""


def target_named(name: str) -> Target:
    """Return a target.

    Raises:
        BackendError: when there is none of that name; names those that there are.
    """
    if name not in TARGETS:
        raise BackendError(f"there is no target {name!r}; there are {', '.join(TARGETS)}")
    return TARGETS[name]
