"""Costs of a pipeline's actions: time per stage, messages between stages, memory."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from math import isfinite, lcm
from numbers import Rational
from typing import Any, ClassVar

from attrs import evolve, field, frozen
from attrs.converters import optional

from ms_parallel.arguments import shown
from ms_parallel.errors import ScheduleError

Number = int | float | Fraction
"""A float means its decimal representation (0.1 is one tenth), so that sums are exact."""


def as_fraction(value: Number) -> Fraction:
    """Return a number as an exact fraction.

    Raises:
        ScheduleError: it is negative, infinite or NaN.
    """
    if isinstance(value, float):
        if not isfinite(value):
            raise ScheduleError(f"a cost must be a finite number, got {value}; measure it again")
        # The shortest decimal that prints the float: 0.1 is 1/10, not the nearest binary fraction.
        value = Fraction(repr(value))
    if not isinstance(value, Rational):
        raise ScheduleError(f"a cost must be a number, got {shown(value)}")
    if value < 0:
        raise ScheduleError(f"a cost must be at least 0, got {value}")
    return Fraction(value)


def _fractions(values: Iterable[Number]) -> tuple[Fraction, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ScheduleError(f"costs must be a list of numbers, got {shown(values)}")
    return tuple(map(as_fraction, values))


@frozen(kw_only=True)
class PassCosts:
    """Time and memory of one microbatch in consecutive parts of a model, one entry per part.

    Any unit of time and any unit of memory may be used; results have the same units.
    """

    part: ClassVar[str] = "part"
    """Name of a part, for error messages."""
    forward: tuple[Fraction, ...] = field(converter=_fractions)
    """Time of the forward."""
    backward_input: tuple[Fraction, ...] = field(converter=_fractions)
    """Time of the input backward. A full backward takes this plus `backward_weight`."""
    backward_weight: tuple[Fraction, ...] = field(converter=_fractions)
    """Time of the weight backward."""
    activation: tuple[Fraction, ...] = field(converter=_fractions)
    """Memory of a microbatch from the start of its forward to the end of its I or B."""
    retained: tuple[Fraction, ...] = field(converter=_fractions)
    """Memory of a microbatch from the end of its I to the end of its W; by default `activation`."""
    latency: Fraction = field(default=Fraction(0), converter=as_fraction)
    """Time from the end of a message's transfer until the receiver can use it."""

    @activation.default
    def _activation(self) -> Sequence[int]:
        return [1] * len(self.forward)

    @retained.default
    def _retained(self) -> Sequence[Fraction]:
        return self.activation

    def __attrs_post_init__(self) -> None:
        if not self.forward:
            raise ScheduleError(
                f"costs need at least one {self.part}; add one entry per {self.part}"
            )
        for name in ("backward_input", "backward_weight", "activation", "retained"):
            self.check_length(name, getattr(self, name))
        for index, (retained, activation) in enumerate(
            zip(self.retained, self.activation, strict=True)
        ):
            if retained > activation:
                raise ScheduleError(
                    f"{self.part} {index} retains {retained} after I but its activation is"
                    f" {activation}; retain at most the activation"
                )

    def check_length(self, name: str, values: Sequence[Number]) -> None:
        """Check that `values` and `forward` have the same length.

        Raises:
            ScheduleError: they do not.
        """
        if len(values) != len(self.forward):
            raise ScheduleError(
                f"{name} has {len(values)} entries but forward has {len(self.forward)}; "
                f"use one entry per {self.part}"
            )


@frozen(kw_only=True)
class Costs(PassCosts):
    """Measured or assumed costs of one microbatch in each stage."""

    part: ClassVar[str] = "stage"
    bandwidth: Fraction | None = field(default=None, converter=optional(as_fraction))
    """Bytes per unit of time from one rank to another, one message at a time. None: no limit."""
    message_bytes: tuple[Fraction, ...] | None = field(default=None, converter=optional(_fractions))
    """Size of the activation that leaves a stage, and of its gradient; None: no transfer time. The
    last stage's entry is unused."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.message_bytes is not None:
            self.check_length("message_bytes", self.message_bytes)
        if self.bandwidth == 0:
            raise ScheduleError("bandwidth must be above 0; use None for no limit")

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
        """Costs that are equal for all `stages`, with messages of size 0."""
        return cls(
            forward=[forward] * stages,
            backward_input=[backward_input] * stages,
            backward_weight=[backward_weight] * stages,
            latency=latency,
            activation=[activation] * stages,
        )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    def ticks(self) -> "Ticks":
        """Convert the costs to integers in the coarsest unit that represents them exactly."""
        transfer = [Fraction(0)] * self.stages
        # A transfer takes time only if both its size and the bandwidth are known.
        if self.bandwidth is not None and self.message_bytes is not None:
            transfer = [size / self.bandwidth for size in self.message_bytes]
        times = [*self.forward, *self.backward_input, *self.backward_weight, *transfer]
        # The least common denominator makes every time an integer, so that simulations are exact.
        per_unit = lcm(*(time.denominator for time in [*times, self.latency]))
        memory_per_unit = lcm(*(m.denominator for m in [*self.activation, *self.retained]))

        def scaled(values: Iterable[Fraction], unit: int) -> tuple[int, ...]:
            return tuple(int(value * unit) for value in values)

        return Ticks(
            per_unit=per_unit,
            forward=scaled(self.forward, per_unit),
            backward_input=scaled(self.backward_input, per_unit),
            backward_weight=scaled(self.backward_weight, per_unit),
            transfer=scaled(transfer, per_unit),
            latency=int(self.latency * per_unit),
            memory_per_unit=memory_per_unit,
            activation=scaled(self.activation, memory_per_unit),
            retained=scaled(self.retained, memory_per_unit),
        )


@frozen(kw_only=True)
class Ticks:
    """Costs as integers; see `Costs` for the fields."""

    TIMES: ClassVar[tuple[str, ...]] = ("forward", "backward_input", "backward_weight", "transfer")
    MEMORY: ClassVar[tuple[str, ...]] = ("activation", "retained")

    per_unit: int
    """Ticks per unit of time."""
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
        """Number of stages."""
        return len(self.forward)

    def changed(
        self, change: Callable[[tuple[int, ...]], tuple[int, ...]], names: Iterable[str]
    ) -> "Ticks":
        """Return a copy with `change` applied to the named fields."""
        changes: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return evolve(self, **changes)

    def work(self, stage: int) -> int:
        """Ticks that a stage computes per microbatch."""
        return self.forward[stage] + self.backward_input[stage] + self.backward_weight[stage]
