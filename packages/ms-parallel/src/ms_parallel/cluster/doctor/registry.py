"""Registry of checks: functions that yield findings, in the files below `checks`."""

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
    """A check."""

    name: str
    about: str
    """Statement that is true if the check finds nothing."""
    look: Look
    needs: Callable[[Examined], bool]
    """Returns whether the check applies."""


_checks: dict[str, Check] = {}


def check(
    name: str, about: str, *, needs: Callable[[Examined], bool] = lambda examined: True
) -> Callable[[Look], Look]:
    """Register the decorated function as a check.

    Args:
        name: name in findings, a word or two with dashes.
        about: statement that is true if the check finds nothing, in one sentence.
        needs: returns whether the check applies; if not, it is skipped.
    """

    def register(look: Look) -> Look:
        assert name not in _checks, f"two checks are named {name}"
        _checks[name] = Check(name=name, about=about, look=look, needs=needs)
        return look

    return register


def all_checks() -> Mapping[str, Check]:
    """Import all files of checks and return the checks sorted by name."""
    for file in walk_packages(checks.__path__, f"{checks.__name__}."):
        import_module(file.name)
    return MappingProxyType(dict(sorted(_checks.items())))
