"""How many layers each stage gets, from measured costs, jointly with the schedule.

Layers stay in the order of the model, so a split is its cuts. The best split of the work alone,
by dynamic programming, begins; then cuts move one layer at a time while the schedule that
`search` makes of them gets shorter, because what counts is the makespan with its bubbles and
messages, not the largest stage.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from fractions import Fraction

from attrs import field, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.portfolio import glance
from ms_parallel.schedules.solver.search import Found, problem_of, search
from ms_parallel.schedules.table.costs import Costs, Number, exact
from ms_parallel.schedules.table.placements import ranks_of

__all__ = ["Balanced", "LayerCosts", "balance"]

_BUDGET = 2_000_000
"""Actions scheduled while layers move, over all splits; some 6 s on one core."""
_GLANCES = 7
"""Arrangements of one split."""


def _each(values: Iterable[Number]) -> tuple[Fraction, ...]:
    return tuple(map(exact, values))


@frozen(kw_only=True)
class LayerCosts:
    """Measured costs of one microbatch in each layer, in the order of the model.

    The embedding and the head count as layers of their own, at the ends.
    """

    forward: tuple[Fraction, ...] = field(converter=_each)
    """Time of the forward."""
    backward_input: tuple[Fraction, ...] = field(converter=_each)
    """Time of the gradients of inputs."""
    backward_weight: tuple[Fraction, ...] = field(converter=_each)
    """Time of the gradients of weights."""
    activation: tuple[Fraction, ...] = field(converter=_each)
    """Memory of a microbatch from its forward to its backward."""
    retained: tuple[Fraction, ...] = field(converter=_each)
    """Memory of a microbatch from its backward of inputs to that of weights; default all of it."""
    latency: Fraction = field(default=Fraction(0), converter=exact)
    """Time from the end of a message's transfer to its use on another rank."""
    transfer: Fraction = field(default=Fraction(0), converter=exact)
    """Time for which a message between stages occupies the link; the same wherever it is cut."""

    @activation.default
    def _activation(self) -> Sequence[int]:
        return [1] * len(self.forward)

    @retained.default
    def _retained(self) -> Sequence[Fraction]:
        return self.activation

    def __attrs_post_init__(self) -> None:
        for name in ("backward_input", "backward_weight", "activation", "retained"):
            if len(getattr(self, name)) != len(self.forward):
                raise ScheduleError(
                    f"{name} has {len(getattr(self, name))} entries but forward has "
                    f"{len(self.forward)}; give one entry a layer"
                )

    @property
    def layers(self) -> int:
        """Layers of the model, embedding and head included."""
        return len(self.forward)

    def work(self, layer: int) -> Fraction:
        """Time of a layer for one microbatch, there and back."""
        return self.forward[layer] + self.backward_input[layer] + self.backward_weight[layer]

    def stages(self, split: Sequence[int]) -> Costs:
        """Costs of the stages that have so many layers each."""
        cuts = [sum(split[:stage]) for stage in range(len(split) + 1)]

        def sums(values: Sequence[Fraction]) -> list[Fraction]:
            return [
                sum(values[cuts[stage] : cuts[stage + 1]], Fraction(0))
                for stage in range(len(split))
            ]

        return Costs(
            forward=sums(self.forward),
            backward_input=sums(self.backward_input),
            backward_weight=sums(self.backward_weight),
            activation=sums(self.activation),
            retained=sums(self.retained),
            latency=self.latency,
            bandwidth=1 if self.transfer else None,
            message_bytes=[self.transfer] * len(split) if self.transfer else None,
        )


@frozen(kw_only=True)
class Balanced:
    """The split that `balance` chose."""

    split: tuple[int, ...]
    """Layers of each stage."""
    found: Found
    """The schedule for it, with its bound; the bound holds for this split."""


def balance(
    layers: LayerCosts,
    memory_cap: Number | Sequence[Number] | None = None,
    *,
    placement: Sequence[int],
    microbatches: int,
    split: bool = True,
    seed: int = 0,
    effort: float = 1.0,
) -> Balanced:
    """Choose how many layers each stage gets, and the schedule.

    Args:
        layers: Measured costs.
        memory_cap: Most activation memory of a rank, or of each; None for no limit.
        placement: Rank of each stage.
        microbatches: Of one step.
        split: Whether backwards of inputs and of weights may be apart.
        seed: Of the search's random walks.
        effort: As in `search`, for the last search; each split on the way costs far less.

    Raises:
        ScheduleError: fewer layers than stages, or a cap below the least that works.
    """
    stages = len(placement)
    if layers.layers < stages:
        raise ScheduleError(
            f"{layers.layers} layers for {stages} stages; every stage needs at least one, "
            "so choose fewer stages"
        )
    chosen = _climb(layers, memory_cap, tuple(placement), microbatches, split)
    found = search(
        layers.stages(chosen),
        memory_cap,
        microbatches=microbatches,
        placement=placement,
        split=split,
        seed=seed,
        effort=effort,
    )
    return Balanced(split=chosen, found=found)


def _climb(
    layers: LayerCosts,
    memory_cap: Number | Sequence[Number] | None,
    placement: tuple[int, ...],
    microbatches: int,
    split_backwards: bool,
) -> tuple[int, ...]:
    """Move one layer at a time, always the best move, until none makes the schedule shorter."""
    tried: dict[tuple[int, ...], Fraction | None] = {}

    def cost(candidate: tuple[int, ...]) -> Fraction | None:
        if candidate not in tried:
            tried[candidate] = None
            with suppress(ScheduleError):
                costs = layers.stages(candidate)
                problem = problem_of(costs, memory_cap, microbatches, placement, split_backwards)
                makespan = glance(problem).makespan
                tried[candidate] = Fraction(makespan, problem.ticks.per_unit)
        return tried[candidate]

    split = _by_work(layers, len(placement))
    best = cost(split)
    most = _BUDGET // (_GLANCES * 3 * len(placement) * microbatches)
    for _ in range(4 * len(placement)):
        if len(tried) > most:
            break
        rivals = [
            (time, rival)
            for rival in _neighbours(split, layers, placement)
            if (time := cost(rival)) is not None
        ]
        if not rivals or (best is not None and min(rivals)[0] >= best):
            break
        best, split = min(rivals)
    return split


def _by_work(layers: LayerCosts, stages: int) -> tuple[int, ...]:
    """The split of least largest stage; of several the one that fills the first stages most."""
    before = [Fraction(0)]
    for layer in range(layers.layers):
        before.append(before[-1] + layers.work(layer))
    # worst[n]: least largest stage when the first n layers have the stages so far; cut[n]: where.
    worst: list[Fraction | None] = [Fraction(0)] + [None] * layers.layers
    cuts: list[list[int]] = []
    for _ in range(stages):
        new: list[Fraction | None] = [None] * (layers.layers + 1)
        cut = [0] * (layers.layers + 1)
        for end in range(1, layers.layers + 1):
            for begin in range(end - 1, -1, -1):
                largest, last = worst[begin], before[end] - before[begin]
                known = new[end]
                if known is not None and last > known:
                    break
                if largest is not None and (known is None or max(largest, last) < known):
                    new[end], cut[end] = max(largest, last), begin
        worst = new
        cuts.append(cut)
    split, end = [], layers.layers
    for cut in reversed(cuts):
        split.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(split))


def _neighbours(
    split: tuple[int, ...], layers: LayerCosts, placement: Sequence[int]
) -> set[tuple[int, ...]]:
    """Splits with one layer moved: over a cut, or from the busiest rank to any other stage."""
    costs = layers.stages(split)
    busy = [Fraction(0)] * ranks_of(placement)
    for stage, rank in enumerate(placement):
        busy[rank] += costs.forward[stage]
        busy[rank] += costs.backward_input[stage] + costs.backward_weight[stage]
    full = [stage for stage, rank in enumerate(placement) if busy[rank] == max(busy)]
    stages = range(len(split))
    moves = {(one, two) for one in stages for two in (one - 1, one + 1) if two in stages}
    moves |= {(one, two) for one in full for two in stages if one != two}
    rivals = set()
    for giver, taker in moves:
        if split[giver] > 1:
            rival = list(split)
            rival[giver] -= 1
            rival[taker] += 1
            rivals.add(tuple(rival))
    return rivals
