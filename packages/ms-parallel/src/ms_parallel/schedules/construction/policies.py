"""Policies that keep a building block's order, or follow its times."""

from collections.abc import Sequence

from ms_parallel.schedules.construction.building_block import Block
from ms_parallel.schedules.construction.problem import Operation, Policy, Problem


def follow(problem: Problem, block: Block) -> Policy:
    """The policy that takes a block's starts as due times, and whatever is ready first."""
    work = problem.longest_work
    return Policy(
        period=work,
        forward=tuple(start * work // block.interval for start in block.forward),
        backward=tuple(start * work // block.interval for start in block.backward),
    )


def keep_order(problem: Problem, order: Sequence[Sequence[Operation]]) -> Policy:
    """The policy that keeps an order of forwards and backwards of inputs whatever the costs."""
    return Policy(
        period=0,
        forward=(0,) * problem.ticks.stages,
        backward=(0,) * problem.ticks.stages,
        order=tuple(map(tuple, order)),
    )
