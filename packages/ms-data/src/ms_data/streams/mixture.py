"""Chooses the source of every sample so that the counts follow the weights exactly.

The due of a source is the sum of its weights over the first t samples. At every t, the number
of samples drawn from a source differs from its due by less than one: Tijdeman's rule ("The chairman
assignment problem", 1980). Among the sources whose next sample may already be drawn, the rule takes
the one with the earliest deadline. It needs to know future weights, so phases are passed in advance
where they are known.

A change of weights that was not known in advance takes effect after a lead-in of at most n - 1
samples, one from every source that is behind. After the lead-in every source has exactly its due,
and the rule restarts; during the lead-in no source is off by more than one either. A source with a
limit stops when its due reaches the limit; the position is known in advance, and the other sources
share its weight from there on. All arithmetic uses integers, so a saved and restored mixture
continues identically.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

from attrs import field, frozen

from ms_data.arguments import check_integer, check_items, check_type, shown
from ms_data.errors import SettingError, StateError
from ms_data.streams.share import state_errors

SCALE = 1 << 32
"""Weights are integer multiples of 1 / SCALE that sum to 1."""

NEVER = 1 << 62
T = TypeVar("T")
_Counts = tuple[int, ...]
_LeadIn = tuple[int, _Counts]
"""Position where a lead-in starts, and the counts at its end."""


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise SettingError(f"weights must be numbers, got {shown(values)}") from None


@frozen
class Phase:
    """Weights that apply from one sample on."""

    start: int
    """Number of samples, over all sources, drawn before this phase."""
    weights: tuple[float, ...] = field(converter=_floats)
    """One weight per source; only their ratios matter."""


Weights = Mapping[str, float] | Sequence[float] | Sequence[Phase]
"""One weight per source, by name or in order; or the phases."""


@frozen(kw_only=True)
class _Stage:
    """A part of the run, starting at `start`, in which dues grow linearly."""

    start: int
    rates: tuple[int, ...]
    """Growth of the due per sample, in units of 1 / SCALE."""
    dues: tuple[int, ...]
    """Dues at `start`, in the same units."""
    lead_in_start: int | None = None
    """Position where the lead-in to this stage starts; the dues are integers then."""


class Mixture:
    """Draws from sources in exact proportions.

    Args:
        names: source names.
        weights: one weight per source, by name or in order; only their ratios matter. Or
            `Phase`s in order, the first with start 0. Default: equal weights.
        limits: maximum number of samples from each source, by name. The mixture ends when all
            sources have reached their limit.

    Raises:
        SettingError: weights are not finite, negative or all 0; phases are out of order; or all
            sources of a phase reach their limits before the next phase starts.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Weights | None = None,
        *,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        check_items("names", names, str, "names of sources", error=SettingError)
        description = "a dict of numbers by source"
        check_type("limits", limits, Mapping, description, error=SettingError, optional=True)
        if not names or len(set(names)) != len(names):
            raise SettingError(f"sources must be one or more distinct names, got {list(names)!r}")
        self.names = tuple(names)
        # Tijdeman's bound for n sources is 1 - 1 / (2n - 2).
        self._slack = SCALE // (2 * (len(names) - 1)) if len(names) > 1 else 0
        # Counts always sum to the position.
        self._position, self._counts = 0, [0] * len(names)
        unknown = sorted(set(limits or ()) - set(names))
        if unknown:
            raise SettingError(f"limits has {unknown[0]!r}, the sources are {sorted(names)}")
        self._limits = [None if limits is None else limits.get(name) for name in names]
        self._set_plan([(phase, None) for phase in self._parse_phases(weights)])

    def _parse_phases(self, weights: Weights | None) -> list[Phase]:
        if weights is not None and not isinstance(weights, Mapping):
            check_items("weights", weights, (Real, Phase), "numbers or Phases", error=SettingError)
        values: Sequence[Any] = self._in_order(
            [1.0] * len(self.names) if weights is None else weights
        )
        phases = [value for value in values if isinstance(value, Phase)]
        numbers = [value for value in values if not isinstance(value, Phase)]
        return [Phase(0, numbers)] if numbers or not phases else phases

    @property
    def position(self) -> int:
        """Number of samples drawn so far."""
        return self._position

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples drawn so far from each source."""
        return dict(zip(self.names, self._counts, strict=True))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Weights over the whole run, including changes that were not known in advance."""
        return tuple(phase for phase, _ in self._plan)

    @property
    def weights(self) -> dict[str, float]:
        """Current weights, normalized to sum to 1; during a lead-in, those it leads to."""
        stage = self._stage(self._position + 1)
        rates = (rate / SCALE for rate in stage.rates)
        return dict(zip(self.names, rates, strict=True))

    @property
    def end(self) -> int | None:
        """Number of samples after which the limits end the mixture; None if they do not."""
        return self._end

    def due(self, position: int) -> dict[str, float]:
        """Return how many of the first `position` samples each source should supply.

        Raises:
            SettingError: position is not an integer of at least 0.
        """
        check_integer("position", position, minimum=0, error=SettingError)
        dues = (self._due(source, position) / SCALE for source in range(len(self.names)))
        return dict(zip(self.names, dues, strict=True))

    def draw(self) -> int:
        """Choose the source of the next sample; return its index."""
        # A lead-in fixes the next sources; otherwise apply Tijdeman's rule.
        source = self._lead_in_queue.pop() if self._lead_in_queue else self._most_urgent()
        self._counts[source] += 1
        self._position += 1
        # only this source's next window moves
        self._draw_windows[source] = self._draw_window(source)
        return source

    def _most_urgent(self) -> int:
        # Earliest deadline first, among the sources that are released at the next position.
        best, best_deadline = -1, NEVER + 1
        for source, (release, deadline) in enumerate(self._draw_windows):
            if release <= self._position + 1 and deadline < best_deadline:
                best, best_deadline = source, deadline
        assert best >= 0, "no source is due, although the dues sum to the position"
        return best

    def step_back(self, counts: Mapping[str, int]) -> None:
        """Return to the position with these counts, keeping the phases.

        Raises:
            SettingError: counts do not have an integer for each source.
        """
        check_type("counts", counts, Mapping, "integers by source", error=SettingError)
        for name in self.names:
            check_integer(f"counts of {name!r}", counts.get(name), minimum=0, error=SettingError)
        self._counts = [counts[name] for name in self.names]
        self._position = sum(self._counts)
        self._set_plan(self._plan)

    def change(self, weights: Weights) -> int:
        """Change the weights for the following samples, replacing all later phases.

        `Phase`s that have ended already are ignored.

        Returns:
            Number of samples, from the start of the run, after which the new weights apply: with n
                sources, at most n - 1 more than the current position.

        Raises:
            SettingError: weights are not finite, negative or all 0, or their number is not that of
                the sources.
        """
        position = self._position  # number of samples drawn before the change
        phases = self._parse_phases(weights)
        for phase in phases:
            _integer_rates(phase.weights, self.names)
        # The phase in force at the current position; later phases keep their starts.
        current = next((phase for phase in reversed(phases) if phase.start <= position), phases[0])
        stage = self._lead_in_stage
        if (
            stage is not None
            and stage.lead_in_start is not None
            and stage.lead_in_start <= position <= stage.start
        ):
            # A lead-in is running: it now leads to the new weights.
            start, counts = stage.start, [due // SCALE for due in stage.dues]
            lead: _LeadIn | None = (stage.lead_in_start, tuple(counts))
        else:
            # The lead-in draws one sample from every source that is behind its due.
            is_behind = [
                self._due(source, position) > count * SCALE
                for source, count in enumerate(self._counts)
            ]
            # The new weights start once every source that is behind has got one sample.
            start = position + sum(is_behind)
            lead = (
                (position, tuple(map(sum, zip(self._counts, is_behind, strict=True))))
                if position
                else None
            )
        past = [
            entry for entry in self._plan if entry[0].start < start and entry[0].start <= position
        ]
        upcoming: list[tuple[Phase, _LeadIn | None]] = [(phase, None) for phase in phases]
        upcoming = [entry for entry in upcoming if entry[0].start > start]
        old_plan = self._plan  # restored if the new plan is invalid
        try:
            self._set_plan([*past, (Phase(start, current.weights), lead), *upcoming])
        except SettingError:
            self._set_plan(old_plan)
            raise
        return start

    def _in_order(self, weights: Mapping[str, T] | Sequence[T]) -> Sequence[T]:
        if not isinstance(weights, Mapping):
            return weights
        if set(weights) != set(self.names):
            raise SettingError(f"weights must name {sorted(self.names)}, got {sorted(weights)}")
        return [weights[name] for name in self.names]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "names": list(self.names),
            "counts": list(self._counts),
            "phases": [
                [phase.start, list(phase.weights), lead and [lead[0], list(lead[1])]]
                for phase, lead in self._plan
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, including its phases.

        Raises:
            StateError: the state belongs to other sources, or is invalid.
        """
        check_type("state", state, Mapping, "a result of state_dict()", error=StateError)
        names = state.get("names")
        if not isinstance(names, list | tuple) or list(names) != list(self.names):
            raise StateError(
                f"the mixture state has sources {state.get('names')!r}, this mixture has "
                f"{list(self.names)!r}; use the same sources in the same order"
            )
        with state_errors("the mixture state"):
            counts = [int(count) for count in state["counts"]]
            if len(counts) != len(self.names) or min(counts) < 0:
                raise ValueError("counts do not match the sources")
            plan: list[tuple[Phase, _LeadIn | None]] = [
                (Phase(int(start), weights), lead and (int(lead[0]), tuple(map(int, lead[1]))))
                for start, weights, lead in state["phases"]
            ]
            self._position, self._counts = sum(counts), counts
            self._set_plan(plan)

    def _set_plan(self, plan: list[tuple[Phase, _LeadIn | None]]) -> None:
        """Install phases with their lead-ins, and recompute the stages."""
        # Everything below is derived from the plan, so only the plan and the counts are saved.
        starts = [phase.start for phase, _ in plan]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise SettingError(
                f"phases must start at 0 and then at increasing positions, got {starts}"
            )
        self._stages: list[_Stage] = []
        self._end: int | None = None
        self._lead_in_stage: _Stage | None = None
        # A stage ends where the next phase, or its lead-in, starts.
        ends = [lead[0] if lead else phase.start for phase, lead in plan[1:]]
        for (phase, lead), end in zip(plan, [*ends, NEVER], strict=True):
            if lead is not None:
                # after a lead-in, dues are integers
                dues = tuple(count * SCALE for count in lead[1])
            elif self._stages:
                dues = tuple(self._due(source, phase.start) for source in range(len(self.names)))
            else:
                dues = (0,) * len(self.names)
            self._add_stages(phase, dues, lead[0] if lead else None, end)
        self._plan = plan
        self._lead_in_queue = self._remaining_lead_in()
        self._draw_windows = [self._draw_window(source) for source in range(len(self.names))]

    def _add_stages(self, phase: Phase, dues: _Counts, lead_in_start: int | None, end: int) -> None:
        """Add the stages of a phase: one, plus one for every limit that is reached."""
        # When a source reaches its limit its weight becomes 0, which starts a new stage with new
        # rates.
        weights, start = list(phase.weights), phase.start
        _integer_rates(weights, self.names)
        while True:
            rates = _integer_rates(weights, self.names) if any(weights) else [0] * len(weights)
            stage = _Stage(start=start, rates=tuple(rates), dues=dues, lead_in_start=lead_in_start)
            # source -> position at which it reaches its limit
            limit_positions = self._limit_positions(stage)
            next_limit = min(limit_positions.values(), default=NEVER)
            if next_limit > start or not any(weights):
                self._stages.append(stage)
                if lead_in_start is not None:
                    self._lead_in_stage, lead_in_start = stage, None
            if not any(weights):
                self._end = start
                if end != NEVER:
                    raise SettingError(
                        f"all sources of the phase at {phase.start} reach their limits after "
                        f"{start} samples, before the next phase at {end}; start that one earlier"
                    )
            if next_limit >= end or not any(weights):
                return
            for source, position in limit_positions.items():
                if position == next_limit:
                    weights[source] = 0.0
            pairs = zip(dues, rates, strict=True)
            dues = tuple(due + (next_limit - start) * rate for due, rate in pairs)
            start = next_limit

    def _limit_positions(self, stage: _Stage) -> dict[int, int]:
        """Return the position at which each source of a stage reaches its limit."""
        return {
            source: stage.start + max(0, limit * SCALE - stage.dues[source]) // rate
            for source, (limit, rate) in enumerate(zip(self._limits, stage.rates, strict=True))
            if limit is not None and rate
        }

    def _remaining_lead_in(self) -> list[int]:
        """Return the sources still to be drawn in the lead-in, last one first."""
        stage = self._lead_in_stage
        if stage is None or stage.lead_in_start is None:
            return []
        begin = stage.lead_in_start
        if not begin <= self._position < stage.start:
            return []
        owed_counts = [
            due - count * SCALE for due, count in zip(stage.dues, self._counts, strict=True)
        ]
        missing = [source for source, owed in enumerate(owed_counts) if owed > 0]
        # The source furthest behind is drawn first.
        return sorted(
            missing, key=lambda source: (self._due(source, begin) - stage.dues[source], -source)
        )

    def _stage(self, position: int) -> _Stage:
        """Return the stage that `position` belongs to, including its lead-in."""
        current = self._stages[0]
        for stage in self._stages:
            first_position = stage.start if stage.lead_in_start is None else stage.lead_in_start + 1
            if first_position <= position:
                current = stage
        return current

    def _due(self, source: int, position: int) -> int:
        stage = self._stage(position)
        if position >= stage.start:
            return stage.dues[source] + (position - stage.start) * stage.rates[source]
        assert stage.lead_in_start is not None
        # During the lead-in the due is interpolated linearly.
        begin = self._due(source, stage.lead_in_start)
        growth = (stage.dues[source] - begin) * (position - stage.lead_in_start)
        return begin + growth // (stage.start - stage.lead_in_start)

    def _draw_window(self, source: int) -> tuple[int, int]:
        """Return the earliest and the latest position for the source's next sample."""
        # Sample number c + 1 is released when the due exceeds c + slack, and due by c + 1 - slack.
        owed = self._counts[source] * SCALE
        deadline = self._first_position(source, owed + SCALE - self._slack)
        return self._first_position(source, owed + self._slack), deadline

    def _first_position(self, source: int, due: int) -> int:
        """Return the first position, from the current stage on, where the due is at least `due`."""
        ends = [
            stage.start if stage.lead_in_start is None else stage.lead_in_start
            for stage in self._stages[1:]
        ]
        for stage, end in zip(self._stages, [*ends, NEVER], strict=True):
            missing = due - stage.dues[source]
            if missing <= 0:
                return stage.start
            if stage.rates[source]:
                position = stage.start - (-missing // stage.rates[source])
                if position <= end:
                    return position
        return NEVER


def _integer_rates(weights: Sequence[float], names: Sequence[str]) -> list[int]:
    """Convert weights to integers of the same ratio that sum to SCALE; 0 stays 0."""
    if len(weights) != len(names) or not all(0 <= weight < float("inf") for weight in weights):
        raise SettingError(
            f"weights must be one number of 0 or more for each of {list(names)}, "
            f"got {list(weights)}"
        )
    total = sum(weights)
    if not 0 < total < float("inf"):
        raise SettingError(f"at least one weight must be above 0, got {list(weights)}")
    # Integer rates keep the arithmetic exact over any number of samples.
    rates = [int(weight / total * SCALE) for weight in weights]
    largest = max(range(len(rates)), key=rates.__getitem__)
    rates[largest] += SCALE - sum(rates)  # absorbs the rounding error
    return rates
