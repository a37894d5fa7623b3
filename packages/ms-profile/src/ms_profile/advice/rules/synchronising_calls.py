"""The host stops to wait for the device in the middle of a step."""

from typing import Final

from ms_profile.advice.rule import calls_rule
from ms_profile.vendors import any_vendors

# What `item` waits in is a call of the driver: both would count the time twice.
DRIVER_CALL: Final = any_vendors("synchronising_call", start="(?!aten::)")

RULE: Final = calls_rule(
    "synchronising_calls",
    DRIVER_CALL,
    least_a_step=2,
    least_share=0.02,
    title="Rank {rank} stops {calls} times in {steps} steps to wait for its device",
    advice="Keep .item(), .cpu(), print and boolean masks out of the step; read the loss a step "
    "late.",
)
