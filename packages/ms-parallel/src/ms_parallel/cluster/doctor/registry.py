"""Registers checks: a function that yields findings, in a file below `checks`, found there."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import walk_packages
from types import MappingProxyType

from attrs import frozen

from ms_parallel.cluster.doctor import checks
from ms_parallel.cluster.doctor.finding import Finding
from ms_parallel.cluster.doctor.recording.recording import Examined

Look = Callable[[Examined], Iterable[Finding]]


@frozen(kw_only=True)
class Check:
    """One thing that is looked at."""

    name: str
    about: str
    """What holds where it finds nothing."""
    look: Look
    needs: Callable[[Examined], bool]
    """Whether there is anything to look at."""


_checks: dict[str, Check] = {}


def check(
    name: str, about: str, *, needs: Callable[[Examined], bool] = lambda examined: True
) -> Callable[[Look], Look]:
    """Register the decorated function as a check.

    Args:
        name: in findings; a word or two with dashes.
        about: what holds where it finds nothing, in one sentence.
        needs: whether there is anything to look at; without, the check is skipped.
    """

    def register(look: Look) -> Look:
        assert name not in _checks, f"two checks are named {name}"
        _checks[name] = Check(name=name, about=about, look=look, needs=needs)
        return look

    return register


def all_checks() -> Mapping[str, Check]:
    """Load every check, and return them by name in order."""
    for file in walk_packages(checks.__path__, f"{checks.__name__}."):
        import_module(file.name)
    return MappingProxyType(dict(sorted(_checks.items())))
