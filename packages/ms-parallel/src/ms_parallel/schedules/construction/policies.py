"""Policies that keep a building block's order or follow its times."""

from collections.abc import Sequence

from ms_parallel.schedules.construction.building_block import BuildingBlock
from ms_parallel.schedules.construction.problem import ListPolicy, Operation, Problem


def follow(problem: Problem, block: BuildingBlock) -> ListPolicy:
    """Return a policy with a block's start times as due times; ready computations run early."""
    work = problem.longest_work
    return ListPolicy(
        period=work,
        forward=tuple(start * work // block.interval for start in block.forward),
        backward=tuple(start * work // block.interval for start in block.backward),
    )


def keep_order(problem: Problem, order: Sequence[Sequence[Operation]]) -> ListPolicy:
    """Return a policy that keeps an order of forwards and input backwards under any costs."""
    return ListPolicy(
        period=0,
        forward=(0,) * problem.ticks.stages,
        backward=(0,) * problem.ticks.stages,
        order=tuple(map(tuple, order)),
    )
