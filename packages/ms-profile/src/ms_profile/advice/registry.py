"""All rules in one list, and the one function that asks them."""

from collections.abc import Callable
from typing import Final

from ms_profile.advice.finding import Finding
from ms_profile.advice.rules.copies import copies
from ms_profile.advice.rules.data_stalls import data_stalls
from ms_profile.advice.rules.device_allocations import device_allocations
from ms_profile.advice.rules.garbage_collection import garbage_collection
from ms_profile.advice.rules.host_bound import host_bound
from ms_profile.advice.rules.small_kernels import small_kernels
from ms_profile.advice.rules.small_messages import small_messages
from ms_profile.advice.rules.stragglers import stragglers
from ms_profile.advice.rules.synchronising_calls import synchronising_calls
from ms_profile.advice.rules.unbalanced_compute import unbalanced_compute
from ms_profile.advice.rules.unhidden_collectives import unhidden_collectives
from ms_profile.analysis.whole_run import Analysis

__all__ = ["RULES", "advise"]

RULES: Final[tuple[Callable[[Analysis], Finding | None], ...]] = (
    host_bound,
    small_kernels,
    data_stalls,
    unhidden_collectives,
    stragglers,
    synchronising_calls,
    garbage_collection,
    unbalanced_compute,
    small_messages,
    device_allocations,
    copies,
)


def advise(analysis: Analysis) -> tuple[Finding, ...]:
    """Ask every rule; what was found, the largest estimated gain first.

    Gains of different findings overlap: they don't add up.
    """
    found = [finding for rule in RULES if (finding := rule(analysis)) is not None]
    return tuple(sorted(found, key=lambda finding: -finding.gain_ns))
