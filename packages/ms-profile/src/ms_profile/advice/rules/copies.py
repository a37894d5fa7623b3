"""Copies between host and device delay compute."""

from typing import Final

from ms_profile.advice.rule import phase_rule
from ms_profile.vendors.category import Category

RULE: Final = phase_rule(
    "copies",
    "copy",
    evidence=Category.COPY,
    min_share=0.03,
    title="Copies not hidden by other work take {share:.0%} of rank {rank}'s time",
    advice="Pin host memory and copy one batch ahead with non_blocking=True on a separate stream; "
    "keep optimizer states on the device that uses them.",
)
