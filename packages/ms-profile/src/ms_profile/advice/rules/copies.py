"""Copies between host and device stand in the way of compute."""

from typing import Final

from ms_profile.advice.rule import phase_rule
from ms_profile.vendors.category import Category

RULE: Final = phase_rule(
    "copies",
    "copy",
    evidence=Category.COPY,
    least_share=0.03,
    title="Copies that nothing hides take {share:.0%} of rank {rank}'s time",
    advice="Pin host memory and copy with non_blocking=True, on a stream of their own, a batch "
    "ahead; keep optimizer states where they are used.",
)
