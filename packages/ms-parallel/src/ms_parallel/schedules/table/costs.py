"""What the actions of a pipeline cost: time a stage, messages between stages, memory held."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import isfinite, lcm

from attrs import field, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind

__all__ = ["Costs", "Number", "Ticks", "exact"]

Number = int | float | Fraction
"""A float stands for the decimal that it prints as: 0.1 is one tenth, so sums are exact."""


def exact(value: Number) -> Fraction:
    """The exact fraction that a number stands for.

    Raises:
        ScheduleError: it is negative, infinite or not a number.
    """
    if isinstance(value, float):
        if not isfinite(value):
            raise ScheduleError(f"a cost of {value} is not a number; measure it again")
        value = Fraction(repr(value))
    if value < 0:
        raise ScheduleError(f"a cost of {value} is negative; costs are 0 or more")
    return Fraction(value)


def _each(values: Iterable[Number]) -> tuple[Fraction, ...]:
    return tuple(map(exact, values))


def _each_or_none(values: Iterable[Number] | None) -> tuple[Fraction, ...] | None:
    return None if values is None else _each(values)


def _exact_or_none(value: Number | None) -> Fraction | None:
    return None if value is None else exact(value)


@frozen(kw_only=True)
class Costs:
    """Measured or assumed costs of one microbatch; a tuple has one entry a stage.

    Times are in any one unit, memory in any other; results come in the same units.
    """

    forward: tuple[Fraction, ...] = field(converter=_each)
    """Time of the forward."""
    backward_input: tuple[Fraction, ...] = field(converter=_each)
    """Time of the gradients of inputs. A full backward takes this and `backward_weight`."""
    backward_weight: tuple[Fraction, ...] = field(converter=_each)
    """Time of the gradients of weights."""
    latency: Fraction = field(default=Fraction(0), converter=exact)
    """Time from the end of a message's transfer to its use on another rank."""
    bandwidth: Fraction | None = field(default=None, converter=_exact_or_none)
    """Bytes a unit of time from one rank to another, one message at a time. None: no limit."""
    message_bytes: tuple[Fraction, ...] | None = field(default=None, converter=_each_or_none)
    """Size of the activation that leaves a stage (its gradient is as large); None: nothing.
    The last stage's entry has no meaning."""
    activation: tuple[Fraction, ...] = field(converter=_each)
    """Memory of a microbatch from the start of its forward to the end of its I or B."""
    retained: tuple[Fraction, ...] = field(converter=_each)
    """Memory of a microbatch from the end of its I to the end of its W; default all of it."""

    @activation.default
    def _activation(self) -> Sequence[int]:
        return [1] * len(self.forward)

    @retained.default
    def _retained(self) -> Sequence[Fraction]:
        return self.activation

    def __attrs_post_init__(self) -> None:
        stages = len(self.forward)
        if not stages:
            raise ScheduleError("costs of no stages; give one entry a stage")
        for name in ("backward_input", "backward_weight", "activation", "retained"):
            _check_length(name, getattr(self, name), stages)
        if self.message_bytes is not None:
            _check_length("message_bytes", self.message_bytes, stages)
        if self.bandwidth == 0:
            raise ScheduleError("a bandwidth of 0 never delivers; leave it out for no limit")
        for stage, (kept, whole) in enumerate(zip(self.retained, self.activation, strict=True)):
            if kept > whole:
                raise ScheduleError(
                    f"stage {stage} retains {kept} after I but its activation is {whole}; "
                    "give at most the activation"
                )

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        forward: Number = 1,
        backward_input: Number = 1,
        backward_weight: Number = 1,
        latency: Number = 0,
        activation: Number = 1,
    ) -> "Costs":
        """The same cost on each of `stages` stages, messages of no size."""
        return cls(
            forward=[forward] * stages,
            backward_input=[backward_input] * stages,
            backward_weight=[backward_weight] * stages,
            latency=latency,
            activation=[activation] * stages,
        )

    @property
    def stages(self) -> int:
        """Stages that these costs are of."""
        return len(self.forward)

    def ticks(self) -> "Ticks":
        """The same costs as integers of the coarsest unit that loses nothing."""
        transfer = [Fraction(0)] * self.stages
        if self.bandwidth is not None and self.message_bytes is not None:
            transfer = [size / self.bandwidth for size in self.message_bytes]
        times = [*self.forward, *self.backward_input, *self.backward_weight, *transfer]
        per_unit = lcm(*(time.denominator for time in [*times, self.latency]))
        memory_per_unit = lcm(*(m.denominator for m in [*self.activation, *self.retained]))

        def whole(values: Iterable[Fraction], unit: int) -> tuple[int, ...]:
            return tuple(int(value * unit) for value in values)

        return Ticks(
            per_unit=per_unit,
            forward=whole(self.forward, per_unit),
            backward_input=whole(self.backward_input, per_unit),
            backward_weight=whole(self.backward_weight, per_unit),
            transfer=whole(transfer, per_unit),
            latency=int(self.latency * per_unit),
            memory_per_unit=memory_per_unit,
            activation=whole(self.activation, memory_per_unit),
            retained=whole(self.retained, memory_per_unit),
        )


def _check_length(name: str, values: Sequence[Fraction], stages: int) -> None:
    if len(values) != stages:
        raise ScheduleError(
            f"{name} has {len(values)} entries but forward has {stages}; give one entry a stage"
        )


@frozen(kw_only=True)
class Ticks:
    """Costs as integers; see `Costs` for the meaning of the fields."""

    per_unit: int
    """Ticks in one unit of time."""
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    transfer: tuple[int, ...]
    """Time for which the message that leaves a stage occupies the link."""
    latency: int
    memory_per_unit: int
    activation: tuple[int, ...]
    retained: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Stages that these costs are of."""
        return len(self.forward)

    def work(self, stage: int) -> int:
        """Ticks that a stage computes for one microbatch."""
        return self.forward[stage] + self.backward_input[stage] + self.backward_weight[stage]

    def duration(self, action: Action) -> int:
        """Ticks that an action computes; an overlap takes as long as its parts in turn."""
        ticks = 0
        for part in action.computations:
            if part.kind is Kind.FORWARD:
                ticks += self.forward[part.stage]
            if part.kind is Kind.BACKWARD_INPUT or part.kind is Kind.BACKWARD:
                ticks += self.backward_input[part.stage]
            if part.kind is Kind.BACKWARD_WEIGHT or part.kind is Kind.BACKWARD:
                ticks += self.backward_weight[part.stage]
        return ticks
