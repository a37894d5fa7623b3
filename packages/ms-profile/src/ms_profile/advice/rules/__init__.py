"""The rules of advice, one a file: a file here that holds `RULE` is found by itself."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from ms_profile.advice.finding import Finding
from ms_profile.advice.rule import Rule
from ms_profile.analysis.whole_run import Analysis

__all__ = ["RULES", "advise"]

RULES: Final[tuple[Rule, ...]] = tuple(
    import_module(f"{__name__}.{found.name}").RULE for found in iter_modules(__path__)
)


def advise(analysis: Analysis) -> tuple[Finding, ...]:
    """Apply every rule and return the findings, the largest estimated gain first.

    Gains of different findings overlap: they don't add up.
    """
    found = [finding for rule in RULES if (finding := rule(analysis)) is not None]
    return tuple(sorted(found, key=lambda finding: -finding.gain_ns))
