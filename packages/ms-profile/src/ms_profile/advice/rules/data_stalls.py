"""Training waits for its next batch while nothing else runs."""

from typing import Final

from ms_profile.advice.rule import phase_rule

RULE: Final = phase_rule(
    "data_stalls",
    "data",
    evidence="waiting for a batch",
    min_share=0.03,
    title="Rank {rank} waits {share:.0%} of the time for its next batch",
    advice="Load ahead: more DataLoader workers, a larger prefetch_factor, pinned memory, "
    "batches tokenized and packed in advance.",
)
