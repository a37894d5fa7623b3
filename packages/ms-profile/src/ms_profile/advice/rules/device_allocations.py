"""The device's allocator goes to the driver in the middle of a step."""

from typing import Final

from ms_profile.advice.rule import calls_rule
from ms_profile.vendors import any_vendors

RULE: Final = calls_rule(
    "device_allocations",
    any_vendors("allocation_call"),
    least_a_step=0,
    least_share=0.01,
    title="Rank {rank} asks the driver for memory {calls} times in {steps} steps",
    advice="Keep shapes the same from step to step, set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True, leave empty_cache() out of the loop.",
)
