"""What the actions of a pipeline cost: time a stage, messages between stages, memory held."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from math import isfinite, lcm
from typing import Any, ClassVar

from attrs import evolve, field, frozen
from attrs.converters import optional

from ms_parallel.errors import ScheduleError

Number = int | float | Fraction
"""A float stands for the decimal that it prints as: 0.1 is one tenth, so sums are exact."""


def as_fraction(value: Number) -> Fraction:
    """Return the exact fraction that a number stands for.

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
    return tuple(map(as_fraction, values))


@frozen(kw_only=True)
class PassCosts:
    """Time and memory of one microbatch in consecutive parts of a model, one entry a part.

    Times are in any one unit, memory in any other; results come in the same units.
    """

    part: ClassVar[str] = "part"
    """What an entry belongs to, for error messages."""
    forward: tuple[Fraction, ...] = field(converter=_each)
    """Time of the forward."""
    backward_input: tuple[Fraction, ...] = field(converter=_each)
    """Time of the gradients of inputs. A full backward takes this and `backward_weight`."""
    backward_weight: tuple[Fraction, ...] = field(converter=_each)
    """Time of the gradients of weights."""
    activation: tuple[Fraction, ...] = field(converter=_each)
    """Memory of a microbatch from the start of its forward to the end of its I or B."""
    retained: tuple[Fraction, ...] = field(converter=_each)
    """Memory of a microbatch from the end of its I to the end of its W; default all of it."""
    latency: Fraction = field(default=Fraction(0), converter=as_fraction)
    """Time from the end of a message's transfer to its use on another rank."""

    @activation.default
    def _activation(self) -> Sequence[int]:
        return [1] * len(self.forward)

    @retained.default
    def _retained(self) -> Sequence[Fraction]:
        return self.activation

    def __attrs_post_init__(self) -> None:
        if not self.forward:
            raise ScheduleError(f"costs of no {self.part}s; give one entry a {self.part}")
        for name in ("backward_input", "backward_weight", "activation", "retained"):
            self.check_length(name, getattr(self, name))
        for index, (kept, whole) in enumerate(zip(self.retained, self.activation, strict=True)):
            if kept > whole:
                raise ScheduleError(
                    f"{self.part} {index} retains {kept} after I but its activation is {whole}; "
                    "give at most the activation"
                )

    def check_length(self, name: str, values: Sequence[Number]) -> None:
        """Refuse another number of entries than `forward` has.

        Raises:
            ScheduleError: with both numbers.
        """
        if len(values) != len(self.forward):
            raise ScheduleError(
                f"{name} has {len(values)} entries but forward has {len(self.forward)}; "
                f"give one entry a {self.part}"
            )


@frozen(kw_only=True)
class Costs(PassCosts):
    """Measured or assumed costs of one microbatch in each stage."""

    part: ClassVar[str] = "stage"
    bandwidth: Fraction | None = field(default=None, converter=optional(as_fraction))
    """Bytes a unit of time from one rank to another, one message at a time. None: no limit."""
    message_bytes: tuple[Fraction, ...] | None = field(default=None, converter=optional(_each))
    """Size of the activation that leaves a stage (its gradient is as large); None: nothing.
    The last stage's entry has no meaning."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.message_bytes is not None:
            self.check_length("message_bytes", self.message_bytes)
        if self.bandwidth == 0:
            raise ScheduleError("a bandwidth of 0 never delivers; leave it out for no limit")

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
        """Give each of `stages` stages the same cost, and messages no size."""
        return cls(
            forward=[forward] * stages,
            backward_input=[backward_input] * stages,
            backward_weight=[backward_weight] * stages,
            latency=latency,
            activation=[activation] * stages,
        )

    @property
    def stages(self) -> int:
        """How many stages have an entry."""
        return len(self.forward)

    def ticks(self) -> "Ticks":
        """Express the same costs as integers of the coarsest unit that loses nothing."""
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


@frozen(kw_only=True)
class Ticks:
    """Costs as integers; see `Costs` for the meaning of the fields."""

    TIMES: ClassVar[tuple[str, ...]] = ("forward", "backward_input", "backward_weight", "transfer")
    MEMORY: ClassVar[tuple[str, ...]] = ("activation", "retained")

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
        """How many stages have an entry."""
        return len(self.forward)

    def changed(
        self, change: Callable[[tuple[int, ...]], tuple[int, ...]], names: Iterable[str]
    ) -> "Ticks":
        """Copy the costs with the entries of all stages changed in the fields of these names."""
        changes: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return evolve(self, **changes)

    def work(self, stage: int) -> int:
        """Add up the ticks that a stage computes for one microbatch."""
        return self.forward[stage] + self.backward_input[stage] + self.backward_weight[stage]
