"""The device allocator calls the driver in the middle of a step."""

from typing import Final

from ms_profile.advice.rule import calls_rule
from ms_profile.vendors import any_vendors

RULE: Final = calls_rule(
    "device_allocations",
    any_vendors("allocation_call"),
    min_per_step=0,
    min_share=0.01,
    title="Rank {rank} asks the driver for memory {calls} times in {steps} steps",
    advice="Keep shapes constant across steps, set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True, and do not call empty_cache() in the loop.",
)
