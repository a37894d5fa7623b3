"""Settings for a split: schedule, sharding, recomputation and offloading."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, cast

from attrs import frozen

from ms_parallel.memory.modes import OFFLOADS, RECOMPUTE_MODES, Offload, Sharding
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.enumeration import ExclusionCounts
from ms_parallel.planner.layouts.pipeline import stage_ranks
from ms_parallel.schedules.generators.registry import GENERATORS

PLAIN = "1f1b"
"""Schedule of a single rank, where all schedules are equal."""


@frozen(kw_only=True)
class SettingChoices:
    """Settings of candidates: fixed ones, and options for the others."""

    fixed: Mapping[str, Any]
    """Fixed settings by name: schedule, sharding, recompute, offload."""
    offloads: bool
    """Whether there is host memory to offload to."""

    def schedules(self, split: Split, stages: int, reasons: ExclusionCounts) -> list[str]:
        """Names of the schedules that are possible for a split.

        Args:
            split: the split.
            stages: maximum number of stages of the model.
            reasons: receives the reasons for exclusions.
        """
        names = [self.fixed["schedule"]] if "schedule" in self.fixed else list(GENERATORS)
        if split.layout.pipeline == 1:
            return [PLAIN]
        # With fewer microbatches than ranks, the bubble is at least as long as the work.
        if 2 < split.layout.pipeline > split.microbatches:
            text = f"{split.layout}, {split.microbatches} microbatches"
            reasons.add("most of the pipeline would be idle", text, len(names))
            return []
        available = []
        for name in names:
            if len(stage_ranks(name, split.layout.pipeline)) > stages:
                text = f"{name} on {split.layout.pipeline} ranks; {stages} cut points"
                reasons.add("more stages than the model has", text)
            else:
                available.append(name)
        return available

    def candidates(self, split: Split, schedule: str) -> Iterator[Candidate]:
        """Yield all candidates with a split and a schedule."""
        # Recomputation varies slowest: the search relies on candidates in its ascending order.
        for recompute, sharding, offload in product(
            self._of("recompute", RECOMPUTE_MODES), self._shardings(split), self._offloads()
        ):
            yield Candidate(
                split=split,
                schedule=schedule,
                sharding=cast(Sharding, sharding),
                recompute=recompute,
                offload=cast(Offload, offload),
            )

    def _of(self, name: str, options: Sequence[str]) -> Sequence[str]:
        return [self.fixed[name]] if name in self.fixed else options

    def _offloads(self) -> Sequence[str]:
        return self._of("offload", OFFLOADS if self.offloads else OFFLOADS[:1])

    def _shardings(self, split: Split) -> Sequence[str]:
        layout = split.layout
        if "sharding" in self.fixed:
            return [self.fixed["sharding"]]
        if layout.token_ranks == 1:
            return ["auto"]
        multiple_microbatches = split.microbatches > 1
        available = ["zero1", "zero3"]
        if layout.expert == 1 and layout.replicate == 1:
            available.append("replicate")
        # With one microbatch, zero2 equals zero1.
        if multiple_microbatches:
            available.append("zero2")
        if multiple_microbatches and layout.pipeline == 1:
            available.append("auto")
        return available
