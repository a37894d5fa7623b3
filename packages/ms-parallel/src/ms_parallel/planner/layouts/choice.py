"""The best layouts of a model on a cluster, best first.

A queue holds what is still to be looked at, by the least that it can come to. What comes out first
is looked at more closely and put back: first all work of a split without waiting, then with the
schedule and what is sent, then with what it holds, and in the end as the engine of each rank counts
it. So few are looked at closely, and what is shown cannot be beaten by what was not.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from attrs import field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError, ParallelError
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.layouts.candidate import Candidate, Count, Split
from ms_parallel.planner.layouts.enumeration import FallenOut, Reasons, splits
from ms_parallel.planner.layouts.passes import PassTimes
from ms_parallel.planner.layouts.pipeline import ENOUGH, refusal, table
from ms_parallel.planner.layouts.rank_bytes import least_bytes, rank_bytes
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.stages import Stages
from ms_parallel.planner.layouts.step import StepSeconds, StepTimes
from ms_parallel.planner.layouts.variants import Choices
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.plan_file import Objective

OBJECTIVES = ("fastest", "cheapest", "least-memory", "largest-model")
FITS = 0.95
"""Share of a device's memory that may be taken: allocators leave gaps, operators need room."""
NEAR = 1.15
"""An estimate up to so many times the limit is counted before it is refused."""
MOST_COUNTED = 24
"""Candidates whose memory is counted by their engines."""
GIB = 1 << 30


@frozen(kw_only=True)
class Question:
    """What is asked, and whom."""

    sizes: ModelSizes
    cluster: Cluster
    devices: Sequence[int]
    """Processes that a layout may have."""
    batch_size: int
    width: int
    """Bytes of a number that is computed with."""
    moment_bytes: int
    """Bytes of the optimizer's moments for each weight."""
    choices: Choices
    rows: Sequence[int] | None
    """Sizes of microbatches; None for all."""
    check: Callable[[Layout], None]
    """Raises what the engine has against a layout."""
    times: PassTimes
    message_bytes: float
    """Bytes of the hidden state of one row."""
    keep: Count
    """Counts what a row keeps."""
    predict: Callable[[Candidate], list[RankMemory]]
    """What each pipeline rank holds, as its engine counts it."""
    working: Callable[[Split], int]
    """Bytes that the largest operator takes beside them, while it runs."""
    objective: Objective = "fastest"
    best: int = 5
    every: bool = False
    """Also those of one layout that differ in the size of microbatches."""
    limit_bytes: int | None = None
    """Limit of a device's memory; None for what the cluster says."""

    @property
    def limit(self) -> int:
        """Most bytes that a rank may hold."""
        return int(self.whole * FITS)

    @property
    def whole(self) -> int:
        """Bytes of a device that a run may take."""
        return self.cluster.memory_bytes if self.limit_bytes is None else self.limit_bytes

    def need(self, memory: Sequence[RankMemory], split: Split) -> int:
        """Compute the least limit of what a rank may hold, with its largest operator."""
        most = max(rank.total for rank in memory)
        return max(most, int(FITS * (most + self.working(split))))


@frozen(kw_only=True)
class FittingLayout:
    """A candidate that fits, and what is predicted of it."""

    candidate: Candidate
    seconds: StepSeconds
    memory: tuple[RankMemory, ...]
    needed_bytes: int
    """Least limit of a rank that it fits into."""

    @property
    def most_bytes(self) -> int:
        """Memory of the rank that holds most."""
        return max(rank.total for rank in self.memory)


@frozen(kw_only=True)
class FoundLayouts:
    """The best layouts, and why the others were ruled out."""

    best: tuple[FittingLayout, ...]
    reasons: Mapping[str, FallenOut]
    candidates: int
    """All that there were."""
    counted: int
    """Candidates for which the engine counted the memory."""


def choose(question: Question) -> FoundLayouts:
    """Choose the best candidates of different layouts, best first; none if nothing fits."""
    steps = StepTimes(
        stages=Stages(question.sizes),
        times=question.times,
        cluster=question.cluster,
        message_bytes=question.message_bytes,
        width=question.width,
        keep=lambda candidate: question.keep(candidate).block,
    )
    return _Search(question=question, steps=steps).run()


@frozen(kw_only=True)
class _Group:
    """All candidates of a split and a schedule."""

    split: Split
    schedule: str

    def __str__(self) -> str:
        schedule = f" {self.schedule}" if self.split.layout.pipeline > 1 else ""
        return f"{self.split.layout} rows={self.split.rows}{schedule}"


@frozen(kw_only=True)
class _Search:
    question: Question
    steps: StepTimes
    reasons: Reasons = field(factory=Reasons)
    queue: list[tuple[float, int, int, _Group | Candidate]] = field(factory=list)
    number: "count[int]" = field(factory=count)

    def run(self) -> FoundLayouts:
        asked = self.question
        total = self._begin()
        best: list[FittingLayout] = []
        shown: set[Layout | Split] = set()
        most, counted = max(MOST_COUNTED, 2 * asked.best), 0
        while self.queue and len(best) < asked.best and counted < most:
            _, _, closeness, one = heappop(self.queue)
            if isinstance(one, _Group):
                if closeness == 0:
                    self._look(one)
                else:
                    self._expand(one)
                continue
            if (one.split if asked.every else one.layout) in shown:
                self.reasons.add("slower than the same layout otherwise", str(one))
                continue
            counted += 1
            found = self._count(one)
            if found is not None:
                best.append(found)
                shown.add(one.split if asked.every else one.layout)
        left = sum(1 for entry in self.queue if entry[2] < 2)
        if left:
            example = str(min(self.queue)[3])
            word = "needs more" if asked.objective == "least-memory" else "slower"
            self.reasons.add(f"{word} than those shown", example, left)
        best.sort(key=lambda each: self._key(each.seconds.all, each.most_bytes, each.candidate))
        return FoundLayouts(
            best=tuple(best), reasons=self.reasons.found, candidates=total, counted=counted
        )

    def _begin(self) -> int:
        """Queue all groups; returns how many candidates they have."""
        asked, total = self.question, 0
        for devices in asked.devices:
            for split in splits(
                asked.sizes,
                asked.cluster,
                devices=devices,
                batch_size=asked.batch_size,
                check=asked.check,
                kept=asked.rows,
                reasons=self.reasons,
            ):
                least_held = least_bytes(split.layout, asked.sizes)
                if least_held > asked.limit:
                    text = f"{split.layout}: weights and gradients {least_held / GIB:.3g} GiB"
                    self.reasons.add("does not fit into memory", text)
                    continue
                for schedule in asked.choices.schedules(split, len(asked.sizes.cuts), self.reasons):
                    group = _Group(split=split, schedule=schedule)
                    first = next(asked.choices.candidates(split, schedule))
                    total += 1
                    least = self.steps.least(first)
                    self._put(group, 0, self._key(least, 0, first))
        return total

    def _put(self, one: _Group | Candidate, closeness: int, key: float) -> None:
        heappush(self.queue, (key, next(self.number), closeness, one))

    def _key(self, seconds: float, size: int, candidate: Candidate) -> float:
        match self.question.objective:
            case "least-memory":
                return float(size)
            case "cheapest":
                return seconds * candidate.layout.world_size
            case _:
                return seconds

    def _look(self, group: _Group) -> None:
        """Put a group back by its fastest candidate, with its schedule and what is sent."""
        layout = group.split.layout
        why = refusal(group.schedule, layout.pipeline, group.split.microbatches)
        if why is not None:
            self.reasons.add("the schedule needs other sizes", f"{group.schedule}: {why}")
            return
        every: dict[str, Candidate] = {}
        for each in self._variants(group):  # of which the first offloads nothing
            every.setdefault(each.sharding, each)
        seconds = min(self.steps.of(each).all for each in every.values())
        self._put(group, 1, self._key(seconds, 0, next(iter(every.values()))))

    def _variants(self, group: _Group) -> list[Candidate]:
        """List the candidates of a group that recompute least and offload least."""
        every = list(self.question.choices.candidates(group.split, group.schedule))
        plain = (every[0].recompute, every[0].offload)
        return [each for each in every if (each.recompute, each.offload) == plain]

    def _expand(self, group: _Group) -> None:
        """Queue what may fit of a group."""
        asked = self.question
        short: tuple[int, Candidate] | None = None
        roomy: set[tuple[str, str]] = set()
        for candidate in asked.choices.candidates(group.split, group.schedule):
            otherwise = (candidate.sharding, candidate.offload)
            if otherwise in roomy:
                self.reasons.add("recomputes what there is room for", str(candidate))
                continue
            try:
                size = asked.need(self._bytes(candidate), group.split)
            except ParallelError as error:
                self.reasons.add("the engine refuses it", f"{candidate}: {error}")
                return
            if size > asked.limit * NEAR:
                short = min(short or (size, candidate), (size, candidate), key=lambda e: e[0])
                continue
            if size * NEAR <= asked.limit and asked.objective != "least-memory":
                roomy.add(otherwise)
            self._put(candidate, 2, self._key(self.steps.of(candidate).all, size, candidate))
        if short is not None:
            self._refuse(short[1], short[0])

    def _bytes(self, candidate: Candidate) -> list[RankMemory]:
        asked = self.question
        return rank_bytes(
            candidate,
            self.steps.stages,
            asked.keep(candidate),
            moment_bytes=asked.moment_bytes,
            width=asked.width,
        )

    def _refuse(self, candidate: Candidate, size: int) -> None:
        text = f"{candidate}: {size / GIB:.3g} of {self.question.limit / GIB:.3g} GiB"
        self.reasons.add("does not fit into memory", text)

    def _count(self, candidate: Candidate) -> FittingLayout | None:
        """Predict a candidate's memory and time as engines count them; None if it does not fit."""
        split = candidate.split
        ranks = split.layout.pipeline
        made = table(candidate.schedule, ranks, min(split.microbatches, ENOUGH * ranks))
        if isinstance(made, str):
            self.reasons.add("the schedule needs other sizes", f"{candidate.schedule}: {made}")
            return None
        try:
            memory = self.question.predict(candidate)
        except (LayoutError, ParallelError) as error:
            self.reasons.add("the engine refuses it", f"{candidate}: {error}")
            return None
        needed = self.question.need(memory, split)
        if needed > self.question.limit:
            self._refuse(candidate, needed)
            return None
        return FittingLayout(
            candidate=candidate,
            seconds=self.steps.of(candidate, played=True),
            memory=tuple(memory),
            needed_bytes=needed,
        )
