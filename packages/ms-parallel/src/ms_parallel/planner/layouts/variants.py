"""The settings that a split can be run with: its schedule, and what is kept where."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, cast

from attrs import frozen

from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.enumeration import Reasons
from ms_parallel.planner.layouts.pipeline import stage_ranks
from ms_parallel.schedules.generators.registry import GENERATORS
from ms_parallel.split.data_axis import OFFLOADS, Offload, Sharding
from ms_parallel.split.memory.recompute_choice import RECOMPUTE_MODES

PLAIN = "1f1b"
"""The schedule of one rank, where all schedules are the same."""


@frozen(kw_only=True)
class Choices:
    """What is chosen among, and what a run file fixes."""

    kept: Mapping[str, Any]
    """Settings that stay as they are, by name: schedule, sharding, recompute, offload."""
    offloads: bool
    """Whether there is a machine's memory beside the devices' to which moments may go."""

    def schedules(self, split: Split, stages: int, reasons: Reasons) -> list[str]:
        """List the names of schedules that there may be for a split.

        Args:
            split: whose microbatches pass.
            stages: into which the model can be cut at most.
            reasons: takes why others fall out.
        """
        names = [self.kept["schedule"]] if "schedule" in self.kept else list(GENERATORS)
        if split.layout.pipeline == 1:
            return [PLAIN]
        if 2 < split.layout.pipeline > split.microbatches:
            text = f"{split.layout}, {split.microbatches} microbatches"
            reasons.add("most of the pipeline would wait", text, len(names))
            return []
        found = []
        for name in names:
            if len(stage_ranks(name, split.layout.pipeline)) > stages:
                text = f"{name} on {split.layout.pipeline} ranks; {stages} places to cut"
                reasons.add("more stages than the model has", text)
            else:
                found.append(name)
        return found

    def candidates(self, split: Split, schedule: str) -> Iterator[Candidate]:
        """Yield the candidates of a split and a schedule, one for each way to run them."""
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

    def _of(self, name: str, every: Sequence[str]) -> Sequence[str]:
        return [self.kept[name]] if name in self.kept else every

    def _offloads(self) -> Sequence[str]:
        return self._of("offload", OFFLOADS if self.offloads else OFFLOADS[:1])

    def _shardings(self, split: Split) -> Sequence[str]:
        layout = split.layout
        if "sharding" in self.kept:
            return [self.kept["sharding"]]
        if layout.token_ranks == 1:
            return ["auto"]
        several = split.microbatches > 1
        found = ["zero1", "zero3"]
        if layout.expert == 1 and layout.replicate == 1:
            found.append("replicate")
        if several:
            found.append("zero2")
        if several and layout.pipeline == 1:
            found.append("auto")
        return found
