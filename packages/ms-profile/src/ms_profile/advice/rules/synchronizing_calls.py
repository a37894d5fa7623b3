"""The host stops to wait for the device in the middle of a step."""

from typing import Final

from ms_profile.advice.rule import calls_rule
from ms_profile.vendors import any_vendors

# `item` waits inside a driver call; counting both would count the time twice.
DRIVER_CALL: Final = any_vendors("synchronizing_call", start="(?!aten::)")

RULE: Final = calls_rule(
    "synchronizing_calls",
    DRIVER_CALL,
    min_per_step=2,
    min_share=0.02,
    title="Rank {rank} stops {calls} times in {steps} steps to wait for its device",
    advice="Keep .item(), .cpu(), print and boolean masks out of the step; read the loss one step "
    "late.",
)
