"""Chooses for each block how it is recomputed, so that a rank keeps no more than a budget."""

import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.errors import ConfigError
from ms_parallel.models.batch import Batch
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.memory.block_costs import BlockCosts
from ms_parallel.split.memory.recompute import RecomputedBlock, recomputed_blocks
from ms_parallel.split.memory.recompute_choice import KINDS

logger = logging.getLogger(__name__)
MIB = 1 << 20


def held_at_once(row: Sequence[Action]) -> list[dict[int, int]]:
    """Count the microbatches of each stage that a rank holds, wherever it holds most.

    Args:
        row: the rank's actions.

    Returns:
        Counts by stage; none of them is at most another in every stage.
    """
    held: dict[int, int] = {}
    found: list[dict[int, int]] = []
    for action in row:
        for part in action.computations:
            if part.kind is Kind.FORWARD:
                held[part.stage] = held.get(part.stage, 0) + 1
        if held not in found:
            found.append(dict(held))
        for part in action.computations:
            if part.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                held[part.stage] -= 1
    return [each for each in found if not any(_covers(other, each) for other in found)]


def _covers(other: Mapping[int, int], one: Mapping[int, int]) -> bool:
    return other != one and all(other.get(stage, 0) >= count for stage, count in one.items())


def peak_bytes(
    costs: Mapping[int, Sequence[BlockCosts]],
    kinds: Mapping[int, Sequence[int]],
    held: Sequence[Mapping[int, int]],
    beside: Mapping[int, int] | None = None,
) -> int:
    """Return the most bytes that blocks keep at once.

    Args:
        costs: of each stage's blocks.
        kinds: of the same blocks, numbers in `KINDS`.
        held: microbatches of each stage that are held at once.
        beside: what each stage keeps beside its blocks, for each microbatch.
    """
    of_stage = {
        stage: sum(c.kept_bytes[kind] for c, kind in zip(blocks, kinds[stage], strict=True))
        + (beside or {}).get(stage, 0)
        for stage, blocks in costs.items()
    }
    sums = (sum(count * of_stage[stage] for stage, count in each.items()) for each in held)
    return max(sums, default=0)


def choose_kinds(
    costs: Mapping[int, Sequence[BlockCosts]],
    held: Sequence[Mapping[int, int]],
    budget_bytes: int,
) -> dict[int, list[int]]:
    """Choose a kind for each block, so that little is computed again and the budget is kept.

    All begin with the least memory. Then, as long as one fits, the change is made that spares most
    work for each byte that it keeps.

    Args:
        costs: of each stage's blocks.
        held: microbatches of each stage that are held at once.
        budget_bytes: most that blocks may keep; where even the least is more, that is chosen.

    Returns:
        By stage, numbers in `KINDS`.
    """
    kinds = {stage: [_least(block) for block in blocks] for stage, blocks in costs.items()}
    most = {stage: max((each.get(stage, 0) for each in held), default=0) for stage in costs}
    while True:
        left = budget_bytes - peak_bytes(costs, kinds, held)
        best: tuple[float, int, int, int] | None = None
        for stage, blocks in costs.items():
            for number, block in enumerate(blocks):
                now = kinds[stage][number]
                for kind in range(len(KINDS)):
                    spared = block.work[now] - block.work[kind]
                    more = (block.kept_bytes[kind] - block.kept_bytes[now]) * most[stage]
                    share = spared / max(more, 1)
                    if spared > 0 and more <= left and (best is None or share > best[0]):
                        best = share, stage, number, kind
        if best is None:
            return kinds
        kinds[best[1]][best[2]] = best[3]


def _least(block: BlockCosts) -> int:
    return min(range(len(KINDS)), key=lambda kind: (block.kept_bytes[kind], block.work[kind]))


class Budget:
    """Keeps the blocks of a process's stages within a budget.

    The first update recomputes all of each block, and measures. Longer batches are measured anew.

    Args:
        stages: by number, their blocks marked.
        groups: the layout's processes.
        budget_bytes: most that a rank's blocks may keep for the backward.
    """

    def __init__(self, stages: Mapping[int, nn.Module], groups: Groups, budget_bytes: int) -> None:
        self.blocks = {number: recomputed_blocks(stage) for number, stage in stages.items()}
        self.groups, self.budget_bytes = groups, budget_bytes
        self.positions = 0
        """Positions of the largest microbatch measured."""
        self.peak_bytes = 0
        """What this rank's blocks keep at most, as chosen."""

    def begin(self, microbatches: Sequence[Batch]) -> None:
        """Prepare for an update; every process calls it."""
        largest = torch.tensor(max(each["tokens"].numel() for each in microbatches))
        largest = self.groups.all_reduce(largest.to(self.groups.device), op=dist.ReduceOp.MAX)
        if largest <= self.positions:
            return
        self.positions = int(largest)
        for block in self._all():
            block.become("full")
            block.costs, block.measures = None, True

    def settle(self, schedule: Schedule) -> None:
        """Choose, if the update has measured; every process calls it.

        Raises:
            ConfigError: even the least that blocks can keep is more than the budget.
        """
        if not any(block.measures for block in self._all()):
            return
        costs = self._agreed()
        held = held_at_once(schedule.actions[self.groups.place.pipeline])
        kinds = choose_kinds(costs, held, self.budget_bytes)
        for stage, blocks in self.blocks.items():
            for block, kind in zip(blocks, kinds[stage], strict=True):
                block.measures = False
                block.become(KINDS[kind])
        self.peak_bytes = peak_bytes(costs, kinds, held)
        mine = torch.tensor(self.peak_bytes, device=self.groups.device)
        most = int(self.groups.all_reduce(mine, op=dist.ReduceOp.MAX))
        if most > self.budget_bytes:
            raise ConfigError(
                f"recompute={self.budget_bytes / MIB:,.1f} MiB is less than the"
                f" {most / MIB:,.1f} MiB that a rank keeps where every block keeps its input alone;"
                " raise it, or lower microbatch_size"
            )
        counts = {kind: sum(block.kind == kind for block in self._all()) for kind in KINDS}
        logger.info("recompute by budget: %s, %d bytes kept", counts, self.peak_bytes)

    def _all(self) -> list[RecomputedBlock]:
        return [block for blocks in self.blocks.values() for block in blocks]

    def _agreed(self) -> dict[int, list[BlockCosts]]:
        """Take the greatest costs of processes with the same blocks, so that all choose alike."""
        mine = [block.costs for block in self._all()]
        table = torch.tensor(
            [[*each.kept_bytes, *each.work] if each else [0] * 2 * len(KINDS) for each in mine],
            dtype=torch.int64,
            device=self.groups.device,
        )
        table = self.groups.all_reduce(table, "stage", op=dist.ReduceOp.MAX)
        rows = iter(table.tolist())
        return {
            stage: [
                BlockCosts(kept_bytes=tuple(row[: len(KINDS)]), work=tuple(row[len(KINDS) :]))
                for row in (next(rows) for _ in blocks)
            ]
            for stage, blocks in self.blocks.items()
        }
