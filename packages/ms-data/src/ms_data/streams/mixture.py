"""Decides which source the next sample comes from, with an exact ledger.

After t samples a source has been drawn within one sample of its due, the sum of its weights over
those t, at every t: Tijdeman's rule ("The chairman assignment problem", 1980). Among the sources
that are due enough, it takes the one that would first fall too far behind; it must know the
weights to come, so phases are given beforehand where they are known. Weights that change
unforeseen take effect after a lead-in of at most n - 1 samples, one of each source that is behind;
then every source has exactly its due and the rule begins anew. Within the lead-in no source is off
by more than one either. A source with a limit stops where its due reaches it, which is known
beforehand: the others share its weight from there on. All arithmetic is in whole numbers: a ledger
saved and loaded is the same ledger.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from attrs import field, frozen

from ms_data.errors import SettingError, StateError
from ms_data.streams.share import reading_state

SCALE = 1 << 32
"""Weights are whole multiples of 1 / SCALE that sum to 1."""

NEVER = 1 << 62
T = TypeVar("T")
_Counts = tuple[int, ...]
_Lead = tuple[int, _Counts]
"""Where a lead-in begins, and the counts that it ends with."""


def _floats(given: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(one) for one in given)


@frozen
class Phase:
    """The weights from one sample on."""

    start: int
    """Samples drawn, over all sources, before this phase."""
    weights: tuple[float, ...] = field(converter=_floats)
    """One a source; their ratios count."""


Weights = Mapping[str, float] | Sequence[float] | Sequence[Phase]
"""One a source, by name or in their order; or the weights of each phase."""


@frozen(kw_only=True)
class _Stage:
    """A part of the run in which dues grow evenly, from `start` on."""

    start: int
    shares: tuple[int, ...]
    """Growth a sample, in units of 1 / SCALE."""
    dues: tuple[int, ...]
    """Dues at `start`, in the same units."""
    led_in: int | None = None
    """Where the samples begin that lead in this stage, whose dues are then whole."""


class Mixture:
    """Draws from sources in exact proportion.

    Args:
        names: the sources.
        weights: one a source, by name or in their order, whose ratios count; or `Phase`s in the
            order of their starts, the first at 0; by default all alike.
        limits: how many samples each source gives at most, by name; the mixture ends where no
            source may give more.

    Raises:
        SettingError: weights are not finite, negative or all 0, or phases are out of order; or
            the sources of a phase reach their limits before the next one begins.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Weights | None = None,
        *,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        if not names or len(set(names)) != len(names):
            raise SettingError(f"sources {list(names)!r}: give one or more names, each once")
        self.names = tuple(names)
        self._slack = SCALE // (2 * (len(names) - 1)) if len(names) > 1 else 0
        self._position, self._counts = 0, [0] * len(names)
        unknown = sorted(set(limits or ()) - set(names))
        if unknown:
            raise SettingError(f"a limit for {unknown[0]!r}, which is none of {sorted(names)}")
        self._limits = [None if limits is None else limits.get(name) for name in names]
        self._set([(phase, None) for phase in self._phases_of(weights)])

    def _phases_of(self, weights: Weights | None) -> list[Phase]:
        given: Sequence[Any] = self._in_order(
            [1.0] * len(self.names) if weights is None else weights
        )
        phases = [one for one in given if isinstance(one, Phase)]
        plain = [one for one in given if not isinstance(one, Phase)]
        return [Phase(0, plain)] if plain or not phases else phases

    @property
    def position(self) -> int:
        """Samples drawn so far."""
        return self._position

    @property
    def counts(self) -> dict[str, int]:
        """Samples drawn so far from each source."""
        return dict(zip(self.names, self._counts, strict=True))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The weights over the run, unforeseen changes included."""
        return tuple(phase for phase, _ in self._plan)

    @property
    def weights(self) -> dict[str, float]:
        """The shares of the sources now, or where a lead-in that has begun ends; they sum to 1."""
        stage = self._stage(self._position + 1)
        shares = (share / SCALE for share in stage.shares)
        return dict(zip(self.names, shares, strict=True))

    @property
    def end(self) -> int | None:
        """How many samples there are, where limits end the mixture; else None."""
        return self._end

    def due(self, position: int) -> dict[str, float]:
        """Compute how many of the first `position` samples each source should give."""
        dues = (self._due(source, position) / SCALE for source in range(len(self.names)))
        return dict(zip(self.names, dues, strict=True))

    def draw(self) -> int:
        """Choose the source of the next sample; return its number."""
        source = self._lead_in.pop() if self._lead_in else self._most_urgent()
        self._counts[source] += 1
        self._position += 1
        self._windows[source] = self._window(source)
        return source

    def _most_urgent(self) -> int:
        best, best_deadline = -1, NEVER + 1
        for source, (release, deadline) in enumerate(self._windows):
            if release <= self._position + 1 and deadline < best_deadline:
                best, best_deadline = source, deadline
        assert best >= 0, "dues sum to the position, so some source is due"
        return best

    def step_back(self, counts: Mapping[str, int]) -> None:
        """Go back to where the ledger had these counts, with the same phases."""
        self._counts = [counts[name] for name in self.names]
        self._position = sum(self._counts)
        self._set(self._plan)

    def change(self, weights: Weights) -> int:
        """Set other weights from now on, in place of all later phases.

        Only the `Phase`s that are in force now, or later, are taken.

        Returns:
            How many samples are drawn before they take effect, over all sources from the start:
            for n sources at most n - 1 more than now.

        Raises:
            SettingError: weights are not finite, negative or all 0, or not one a source.
        """
        now = self._position
        phases = self._phases_of(weights)
        for phase in phases:
            _shares(phase.weights, self.names)
        current = next((one for one in reversed(phases) if one.start <= now), phases[0])
        stage = self._led
        if stage is not None and stage.led_in is not None and stage.led_in <= now <= stage.start:
            # These samples lead in the new weights as well as those that never came.
            start, whole = stage.start, [due // SCALE for due in stage.dues]
            lead: _Lead | None = (stage.led_in, tuple(whole))
        else:
            behind = [self._due(at, now) > count * SCALE for at, count in enumerate(self._counts)]
            start = now + sum(behind)
            lead = (now, tuple(map(sum, zip(self._counts, behind, strict=True)))) if now else None
        kept = [one for one in self._plan if one[0].start < start and one[0].start <= now]
        later: list[tuple[Phase, _Lead | None]] = [(one, None) for one in phases]
        later = [one for one in later if one[0].start > start]
        before = self._plan
        try:
            self._set([*kept, (Phase(start, current.weights), lead), *later])
        except SettingError:
            self._set(before)
            raise
        return start

    def _in_order(self, weights: Mapping[str, T] | Sequence[T]) -> Sequence[T]:
        if not isinstance(weights, Mapping):
            return weights
        if set(weights) != set(self.names):
            raise SettingError(
                f"weights are for {sorted(weights)}; give one for each of {sorted(self.names)}"
            )
        return [weights[name] for name in self.names]

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger: a few JSON values."""
        return {
            "names": list(self.names),
            "counts": list(self._counts),
            "phases": [
                [phase.start, list(phase.weights), lead and [lead[0], list(lead[1])]]
                for phase, lead in self._plan
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ledger, its phases included.

        Raises:
            StateError: it is of other sources, or not a ledger.
        """
        if list(state.get("names", ())) != list(self.names):
            raise StateError(
                f"the ledger is of the sources {state.get('names')!r}, this mixture has "
                f"{list(self.names)!r}; name the same ones in the same order"
            )
        with reading_state("the ledger"):
            counts = [int(count) for count in state["counts"]]
            if len(counts) != len(self.names) or min(counts) < 0:
                raise ValueError("counts do not fit the sources")
            plan: list[tuple[Phase, _Lead | None]] = [
                (Phase(int(start), weights), lead and (int(lead[0]), tuple(map(int, lead[1]))))
                for start, weights, lead in state["phases"]
            ]
            self._position, self._counts = sum(counts), counts
            self._set(plan)

    def _set(self, plan: list[tuple[Phase, _Lead | None]]) -> None:
        """Set phases, each with its lead-in, if it has one."""
        starts = [phase.start for phase, _ in plan]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise SettingError(
                f"phases start at {starts}; the first starts at 0, the others each later"
            )
        self._stages: list[_Stage] = []
        self._end: int | None = None
        self._led: _Stage | None = None
        ends = [lead[0] if lead else phase.start for phase, lead in plan[1:]]
        for (phase, lead), end in zip(plan, [*ends, NEVER], strict=True):
            if lead is not None:
                dues = tuple(count * SCALE for count in lead[1])
            elif self._stages:
                dues = tuple(self._due(at, phase.start) for at in range(len(self.names)))
            else:
                dues = (0,) * len(self.names)
            self._add_stages(phase, dues, lead[0] if lead else None, end)
        self._plan = plan
        self._lead_in = self._leading()
        self._windows = [self._window(source) for source in range(len(self.names))]

    def _add_stages(self, phase: Phase, dues: _Counts, led_in: int | None, end: int) -> None:
        """Add the stages of a phase: one, and another wherever a source reaches its limit."""
        weights, start = list(phase.weights), phase.start
        _shares(weights, self.names)
        while True:
            shares = _shares(weights, self.names) if any(weights) else [0] * len(weights)
            stage = _Stage(start=start, shares=tuple(shares), dues=dues, led_in=led_in)
            reached = self._reached(stage)
            cut = min(reached.values(), default=NEVER)
            if cut > start or not any(weights):
                self._stages.append(stage)
                if led_in is not None:
                    self._led, led_in = stage, None
            if not any(weights):
                self._end = start
                if end != NEVER:
                    raise SettingError(
                        f"the sources of the phase from {phase.start} on reach their limits after "
                        f"{start} samples, before the phase from {end} on; begin that one earlier"
                    )
            if cut >= end or not any(weights):
                return
            for source, at in reached.items():
                if at == cut:
                    weights[source] = 0.0
            grown = zip(dues, shares, strict=True)
            dues = tuple(due + (cut - start) * share for due, share in grown)
            start = cut

    def _reached(self, stage: _Stage) -> dict[int, int]:
        """Find up to which position each source of a stage may grow, if it has a limit."""
        return {
            at: stage.start + max(0, limit * SCALE - stage.dues[at]) // share
            for at, (limit, share) in enumerate(zip(self._limits, stage.shares, strict=True))
            if limit is not None and share
        }

    def _leading(self) -> list[int]:
        """Find the sources that are still to be drawn in the lead-in, last one first."""
        stage = self._led
        if stage is None or stage.led_in is None:
            return []
        begin = stage.led_in
        if not begin <= self._position < stage.start:
            return []
        owed = [due - count * SCALE for due, count in zip(stage.dues, self._counts, strict=True)]
        missing = [source for source, one in enumerate(owed) if one > 0]
        # Who was furthest behind comes first.
        return sorted(missing, key=lambda at: (self._due(at, begin) - stage.dues[at], -at))

    def _stage(self, position: int) -> _Stage:
        """Find the stage that `position` lies in, or leads in to."""
        found = self._stages[0]
        for stage in self._stages:
            begins = stage.start if stage.led_in is None else stage.led_in + 1
            if begins <= position:
                found = stage
        return found

    def _due(self, source: int, position: int) -> int:
        stage = self._stage(position)
        if position >= stage.start:
            return stage.dues[source] + (position - stage.start) * stage.shares[source]
        assert stage.led_in is not None
        begin = self._due(source, stage.led_in)
        way = (stage.dues[source] - begin) * (position - stage.led_in)
        return begin + way // (stage.start - stage.led_in)

    def _window(self, source: int) -> tuple[int, int]:
        """Compute from which draw on the source's next sample may come, and by which it must."""
        owed = self._counts[source] * SCALE
        deadline = self._first(source, owed + SCALE - self._slack)
        return self._first(source, owed + self._slack), deadline

    def _first(self, source: int, due: int) -> int:
        """Find the smallest position, from the current stage on, with this due or more."""
        ends = [one.start if one.led_in is None else one.led_in for one in self._stages[1:]]
        for stage, end in zip(self._stages, [*ends, NEVER], strict=True):
            missing = due - stage.dues[source]
            if missing <= 0:
                return stage.start
            if stage.shares[source]:
                at = stage.start - (-missing // stage.shares[source])
                if at <= end:
                    return at
        return NEVER


def _shares(weights: Sequence[float], names: Sequence[str]) -> list[int]:
    """Turn weights into whole numbers of the same ratio that sum to SCALE; 0 stays 0."""
    if len(weights) != len(names) or not all(0 <= one < float("inf") for one in weights):
        raise SettingError(
            f"weights {list(weights)} for {list(names)}: give a number of 0 or more for each"
        )
    total = sum(weights)
    if not 0 < total < float("inf"):
        raise SettingError(f"weights {list(weights)}: at least one must be above 0")
    shares = [int(one / total * SCALE) for one in weights]
    largest = max(range(len(shares)), key=shares.__getitem__)
    shares[largest] += SCALE - sum(shares)
    return shares
