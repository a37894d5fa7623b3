"""Chooses a recompute mode for each block so that a rank's activations fit into a memory budget."""

import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ms_parallel.cluster.groups import Groups
from ms_parallel.errors import ConfigError
from ms_parallel.memory.block_costs import BlockCosts
from ms_parallel.memory.modes import RECOMPUTE_MODES
from ms_parallel.memory.recompute import RecomputedBlock, recomputed_blocks
from ms_parallel.models.batch import Batch
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.schedule import Schedule

logger = logging.getLogger(__name__)
MIB = 1 << 20


def peak_microbatches(row: Sequence[Action]) -> list[dict[int, int]]:
    """Return the peaks of a rank's live microbatches: how many it holds of each stage at once.

    A microbatch is live from its forward to the end of its backward pass. Which peak needs most
    memory depends on the stages' sizes, so all maximal ones are returned.

    Args:
        row: the rank's actions.

    Returns:
        Microbatch counts by stage; no element is at most another in every stage.
    """
    live: dict[int, int] = {}
    snapshots: list[dict[int, int]] = []
    # A forward holds its activations from its start, a backward until its end.
    for action in row:
        for part in action.computations:
            if part.kind is Kind.FORWARD:
                live[part.stage] = live.get(part.stage, 0) + 1
        if live not in snapshots:
            snapshots.append(dict(live))
        for part in action.computations:
            if part.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                live[part.stage] -= 1
    return [
        counts for counts in snapshots if not any(_covers(larger, counts) for larger in snapshots)
    ]


def _covers(larger: Mapping[int, int], smaller: Mapping[int, int]) -> bool:
    return larger != smaller and all(
        larger.get(stage, 0) >= count for stage, count in smaller.items()
    )


def peak_bytes(
    costs: Mapping[int, Sequence[BlockCosts]],
    modes: Mapping[int, Sequence[int]],
    peaks: Sequence[Mapping[int, int]],
    extra_bytes: Mapping[int, int] | None = None,
) -> int:
    """Return the peak bytes of saved activations on a rank.

    Args:
        costs: block costs by stage.
        modes: recompute mode of the same blocks, as an index into `RECOMPUTE_MODES`.
        peaks: live microbatches by stage, from `peak_microbatches`.
        extra_bytes: bytes saved outside the blocks, by stage, per microbatch.
    """
    stage_bytes = {
        stage: sum(c.kept_bytes[mode] for c, mode in zip(blocks, modes[stage], strict=True))
        + (extra_bytes or {}).get(stage, 0)
        for stage, blocks in costs.items()
    }
    sums = (sum(count * stage_bytes[stage] for stage, count in peak.items()) for peak in peaks)
    return max(sums, default=0)


def choose_modes(
    costs: Mapping[int, Sequence[BlockCosts]],
    peaks: Sequence[Mapping[int, int]],
    budget_bytes: int,
) -> dict[int, list[int]]:
    """Choose a recompute mode for each block that fits the budget with little recomputation.

    Greedy: start every block in its smallest mode, then repeatedly make the change that fits
    and saves the most FLOPs per byte.

    Args:
        costs: block costs by stage.
        peaks: live microbatches by stage, from `peak_microbatches`.
        budget_bytes: limit for saved activations. If even the smallest modes exceed it, they are
            returned.

    Returns:
        Indices into `RECOMPUTE_MODES`, by stage.
    """
    modes = {stage: [_smallest(block) for block in blocks] for stage, blocks in costs.items()}
    max_live = {stage: max((peak.get(stage, 0) for peak in peaks), default=0) for stage in costs}
    # Each round lowers the FLOPs that one block recomputes, so the loop ends.
    while True:
        room = budget_bytes - peak_bytes(costs, modes, peaks)
        best: tuple[float, int, int, int] | None = None  # (FLOPs per byte, stage, block, mode)
        for stage, blocks in costs.items():
            for index, block in enumerate(blocks):
                current = modes[stage][index]
                for mode in range(len(RECOMPUTE_MODES)):
                    saved_flops = block.flops[current] - block.flops[mode]
                    # An upper bound: the stages need not all peak at the same time.
                    added = (block.kept_bytes[mode] - block.kept_bytes[current]) * max_live[stage]
                    gain = saved_flops / max(added, 1)
                    if saved_flops > 0 and added <= room and (best is None or gain > best[0]):
                        best = gain, stage, index, mode
        if best is None:
            return modes
        modes[best[1]][best[2]] = best[3]


def _smallest(block: BlockCosts) -> int:
    modes = range(len(RECOMPUTE_MODES))
    return min(modes, key=lambda mode: (block.kept_bytes[mode], block.flops[mode]))


class Budget:
    """Keeps the activations of a process's blocks within a memory budget.

    The first step measures every block under `full` recomputation, and modes are chosen when it
    ends. A step with longer batches measures again.

    Args:
        stages: this process's stages by number, after `recompute_blocks`.
        groups: process groups of the layout.
        budget_bytes: limit for the activations that a rank's blocks save for the backward pass.
    """

    def __init__(self, stages: Mapping[int, nn.Module], groups: Groups, budget_bytes: int) -> None:
        self.blocks = {number: recomputed_blocks(stage) for number, stage in stages.items()}
        self.groups, self.budget_bytes = groups, budget_bytes
        self.positions = 0
        """Token positions of the largest microbatch measured so far."""
        self.peak_bytes = 0
        """Peak activation bytes of this rank's blocks in the chosen modes."""

    def start_step(self, microbatches: Sequence[Batch]) -> None:
        """Switch to measuring if a microbatch is larger than any measured so far; collective."""
        largest = torch.tensor(max(batch["tokens"].numel() for batch in microbatches))
        # All processes must agree to measure, as choosing modes is collective.
        largest = self.groups.all_reduce(largest.to(self.groups.device), op=dist.ReduceOp.MAX)
        if largest <= self.positions:
            return
        self.positions = int(largest)
        for block in self._all_blocks():
            block.set_mode("full")
            block.costs, block.measures = None, True

    def end_step(self, schedule: Schedule) -> None:
        """Choose the modes if this step has measured the blocks; collective.

        Raises:
            ConfigError: the smallest modes exceed the budget.
        """
        if not any(block.measures for block in self._all_blocks()):
            return
        costs = self._reduced_costs()
        peaks = peak_microbatches(schedule.actions[self.groups.place.pipeline])
        modes = choose_modes(costs, peaks, self.budget_bytes)
        for stage, blocks in self.blocks.items():
            for block, mode in zip(blocks, modes[stage], strict=True):
                block.measures = False
                block.set_mode(RECOMPUTE_MODES[mode])
        self.peak_bytes = peak_bytes(costs, modes, peaks)
        # Only one rank may exceed the budget, and all must raise.
        local_peak = torch.tensor(self.peak_bytes, device=self.groups.device)
        max_peak = int(self.groups.all_reduce(local_peak, op=dist.ReduceOp.MAX))
        if max_peak > self.budget_bytes:
            raise ConfigError(
                f"recompute={self.budget_bytes / MIB:,.1f} MiB must be at least the"
                f" {max_peak / MIB:,.1f} MiB that a rank saves when it recomputes every block in"
                " full; raise it, or lower microbatch_size"
            )
        counts = {
            mode: sum(block.mode == mode for block in self._all_blocks())
            for mode in RECOMPUTE_MODES
        }
        logger.info("recompute modes under the budget: %s, %d bytes saved", counts, self.peak_bytes)

    def _all_blocks(self) -> list[RecomputedBlock]:
        return [block for blocks in self.blocks.values() for block in blocks]

    def _reduced_costs(self) -> dict[int, list[BlockCosts]]:
        """Take the maximum costs over the processes of a stage, so that all choose the same modes.

        Blocks that were not measured on this process count as zero.
        """
        width = len(RECOMPUTE_MODES)
        local = [block.costs for block in self._all_blocks()]
        table = torch.tensor(
            [[*costs.kept_bytes, *costs.flops] if costs else [0] * 2 * width for costs in local],
            dtype=torch.int64,
            device=self.groups.device,
        )  # (blocks, 2 * modes)
        table = self.groups.all_reduce(table, "stage", op=dist.ReduceOp.MAX)
        rows = iter(table.tolist())
        return {
            stage: [
                BlockCosts(kept_bytes=tuple(row[:width]), flops=tuple(row[width:]))
                for row in (next(rows) for _ in blocks)
            ]
            for stage, blocks in self.blocks.items()
        }
