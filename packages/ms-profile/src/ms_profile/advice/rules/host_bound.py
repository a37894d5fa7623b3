"""The device idles because the host launches work too slowly."""

from typing import Final

from ms_profile.advice.rule import phase_rule

RULE: Final = phase_rule(
    "host_bound",
    "launch",
    evidence="device idle, host launching",
    min_share=0.10,
    title="The device of rank {rank} idles {share:.0%} of the time while the host prepares work",
    advice="Launch fewer or larger kernels: torch.compile, CUDA graphs, larger batches, fused "
    "optimizers; move logging out of the step.",
)
