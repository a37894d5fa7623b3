"""Advice rules, one per module; modules in this package that define `RULE` are registered."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from ms_profile.advice.finding import Finding
from ms_profile.advice.rule import Rule
from ms_profile.analysis.whole_run import Analysis
from ms_profile.arguments import check_type
from ms_profile.errors import TraceError

__all__ = ["RULES", "advise"]

RULES: Final[tuple[Rule, ...]] = tuple(
    import_module(f"{__name__}.{module.name}").RULE for module in iter_modules(__path__)
)


def advise(analysis: Analysis) -> tuple[Finding, ...]:
    """Apply every rule and return the findings, largest estimated gain first.

    The gains of different findings overlap, so they must not be added up.

    Raises:
        TraceError: `analysis` is not an Analysis.
    """
    check_type("analysis", analysis, Analysis, "an Analysis, as analyse returns", error=TraceError)
    findings = [finding for rule in RULES if (finding := rule(analysis)) is not None]
    return tuple(sorted(findings, key=lambda finding: -finding.gain_ns))
