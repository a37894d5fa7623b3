"""Best-first search for the best layouts of a model on a cluster.

A queue holds groups and candidates by a lower bound of their key. The first entry is evaluated more
closely and pushed back: first by the total work of a split without waiting, then with its schedule
and communication, then with its memory, and finally with the memory that the engine of each rank
counts. Few entries need the expensive evaluations, and no entry left in the queue has a lower bound
below the layouts in the result.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from attrs import field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError, ParallelError
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.layouts.candidate import Candidate, Count, Split
from ms_parallel.planner.layouts.enumeration import Exclusion, ExclusionCounts, splits
from ms_parallel.planner.layouts.passes import TimeModel
from ms_parallel.planner.layouts.pipeline import SIMULATED_PER_RANK, refusal, table
from ms_parallel.planner.layouts.rank_bytes import min_bytes, rank_bytes
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.layouts.stages import Stages
from ms_parallel.planner.layouts.step import PredictedStep, StepTimePredictor
from ms_parallel.planner.layouts.variants import SettingChoices
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.plan_file import Objective

OBJECTIVES = ("fastest", "cheapest", "least-memory", "largest-model")
USABLE = 0.95
"""Usable fraction of a device's memory: allocators leave gaps, and operators need temporaries."""
TOLERANCE = 1.15
"""Candidates with estimates up to this multiple of the limit are counted before being excluded."""
MAX_COUNTED = 24
"""Maximum number of candidates whose memory is counted by their engines."""
GIB = 1 << 30


@frozen(kw_only=True)
class SearchProblem:
    """Model, cluster, objective and limits of a layout search."""

    sizes: ModelSizes
    cluster: Cluster
    devices: Sequence[int]
    """Allowed numbers of processes."""
    batch_size: int
    width: int
    """Bytes of a number in the compute dtype."""
    moment_bytes: int
    """Bytes of optimizer state per weight."""
    choices: SettingChoices
    rows: Sequence[int] | None
    """Allowed microbatch sizes; None for all."""
    check: Callable[[Layout], None]
    """Raises the engine's error for an unsupported layout."""
    times: TimeModel
    message_bytes: float
    """Bytes of the hidden states of one row."""
    saved_bytes: Count
    """Counts the bytes saved per row."""
    predict: Callable[[Candidate], list[RankMemory]]
    """Predicts the memory of each pipeline rank, as its engine counts it."""
    working: Callable[[Split], int]
    """Bytes of the largest temporary."""
    objective: Objective = "fastest"
    best: int = 5
    every: bool = False
    """List layouts that differ only in microbatch size separately."""
    limit_bytes: int | None = None
    """Memory limit of a device; None for the cluster's."""

    @property
    def limit(self) -> int:
        """Memory limit of a rank."""
        return int(self.device_bytes * USABLE)

    @property
    def device_bytes(self) -> int:
        """Memory of a device available to a run."""
        return self.cluster.memory_bytes if self.limit_bytes is None else self.limit_bytes

    def needed_bytes(self, memory: Sequence[RankMemory], split: Split) -> int:
        """Smallest limit that suffices for this memory plus the largest temporary."""
        peak = max(rank.total for rank in memory)
        # Temporaries may also use the reserve of 1 - USABLE: peak + temporary <= limit / USABLE.
        return max(peak, int(USABLE * (peak + self.working(split))))


@frozen(kw_only=True)
class FittingLayout:
    """A candidate that fits, with its predictions."""

    candidate: Candidate
    seconds: PredictedStep
    memory: tuple[RankMemory, ...]
    needed_bytes: int
    """Smallest rank limit into which it fits."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory, maximum over pipeline ranks."""
        return max(rank.total for rank in self.memory)


@frozen(kw_only=True)
class SearchResult:
    """The best layouts, and the reasons for excluding others."""

    best: tuple[FittingLayout, ...]
    reasons: Mapping[str, Exclusion]
    candidates: int
    """Number of groups of candidates."""
    counted: int
    """Number of candidates whose memory was counted by the engine."""


def choose(problem: SearchProblem) -> SearchResult:
    """Find the best candidates with different layouts, best first; none if nothing fits."""
    steps = StepTimePredictor(
        stages=Stages(problem.sizes),
        times=problem.times,
        cluster=problem.cluster,
        message_bytes=problem.message_bytes,
        width=problem.width,
        saved_bytes=lambda candidate: problem.saved_bytes(candidate).block,
    )
    return _Search(problem=problem, steps=steps).run()


@frozen(kw_only=True)
class _Group:
    """All candidates with the same split and schedule."""

    split: Split
    schedule: str

    def __str__(self) -> str:
        schedule = f" {self.schedule}" if self.split.layout.pipeline > 1 else ""
        return f"{self.split.layout} rows={self.split.rows}{schedule}"


@frozen(kw_only=True)
class _Search:
    problem: SearchProblem
    steps: StepTimePredictor
    reasons: ExclusionCounts = field(factory=ExclusionCounts)
    queue: list[tuple[float, int, int, _Group | Candidate]] = field(factory=list)
    number: "count[int]" = field(factory=count)  # breaks ties, as groups cannot be compared

    def run(self) -> SearchResult:
        problem = self.problem
        total = self._enqueue_groups()
        best: list[FittingLayout] = []
        listed: set[Layout | Split] = set()
        # Counting with engines is expensive, so a search may end with fewer layouts than asked.
        max_counted, counted = max(MAX_COUNTED, 2 * problem.best), 0
        while self.queue and len(best) < problem.best and counted < max_counted:
            # closeness: 0 bounds a group, 1 estimates its fastest candidate, 2 is one candidate.
            _, _, closeness, item = heappop(self.queue)
            if isinstance(item, _Group):
                if closeness == 0:
                    self._estimate(item)
                else:
                    self._expand(item)
                continue
            # A layout is listed once, with its best settings.
            if (item.split if problem.every else item.layout) in listed:
                self.reasons.add("slower than the same layout otherwise", str(item))
                continue
            counted += 1
            layout = self._count(item)
            if layout is not None:
                best.append(layout)
                listed.add(item.split if problem.every else item.layout)
        remaining = sum(1 for entry in self.queue if entry[2] < 2)
        if remaining:
            example = str(min(self.queue)[3])
            comparison = "needs more" if problem.objective == "least-memory" else "slower"
            self.reasons.add(f"{comparison} than those shown", example, remaining)
        best.sort(
            key=lambda layout: self._key(layout.seconds.all, layout.peak_bytes, layout.candidate)
        )
        return SearchResult(
            best=tuple(best), reasons=self.reasons.counts, candidates=total, counted=counted
        )

    def _enqueue_groups(self) -> int:
        """Push all groups; return their number."""
        problem, total = self.problem, 0
        for devices in problem.devices:
            for split in splits(
                problem.sizes,
                problem.cluster,
                devices=devices,
                batch_size=problem.batch_size,
                check=problem.check,
                allowed_rows=problem.rows,
                reasons=self.reasons,
            ):
                # No sharding, recomputation or offloading goes below this bound.
                lower_bound = min_bytes(split.layout, problem.sizes)
                if lower_bound > problem.limit:
                    text = f"{split.layout}: weights and gradients {lower_bound / GIB:.3g} GiB"
                    self.reasons.add("does not fit into memory", text)
                    continue
                for schedule in problem.choices.schedules(
                    split, len(problem.sizes.cuts), self.reasons
                ):
                    group = _Group(split=split, schedule=schedule)
                    first = next(problem.choices.candidates(split, schedule))
                    total += 1
                    min_seconds = self.steps.lower_bound(first)
                    self._push(group, 0, self._key(min_seconds, 0, first))
        return total

    def _push(self, item: _Group | Candidate, closeness: int, key: float) -> None:
        heappush(self.queue, (key, next(self.number), closeness, item))

    def _key(self, seconds: float, size: int, candidate: Candidate) -> float:
        match self.problem.objective:
            case "least-memory":
                return float(size)
            case "cheapest":
                return seconds * candidate.layout.world_size
            case _:
                return seconds

    def _estimate(self, group: _Group) -> None:
        """Push a group by its fastest candidate, including schedule and communication."""
        layout = group.split.layout
        reason = refusal(group.schedule, layout.pipeline, group.split.microbatches)
        if reason is not None:
            self.reasons.add("the schedule needs other sizes", f"{group.schedule}: {reason}")
            return
        by_sharding: dict[str, Candidate] = {}
        for candidate in self._variants(group):  # the first has no offloading
            by_sharding.setdefault(candidate.sharding, candidate)
        seconds = min(self.steps.of(candidate).all for candidate in by_sharding.values())
        self._push(group, 1, self._key(seconds, 0, next(iter(by_sharding.values()))))

    def _variants(self, group: _Group) -> list[Candidate]:
        """Candidates of a group with the least recomputation and offloading."""
        candidates = list(self.problem.choices.candidates(group.split, group.schedule))
        plain = (candidates[0].recompute, candidates[0].offload)
        return [
            candidate
            for candidate in candidates
            if (candidate.recompute, candidate.offload) == plain
        ]

    def _expand(self, group: _Group) -> None:
        """Push the candidates of a group that may fit."""
        problem = self.problem
        too_large: tuple[int, Candidate] | None = None
        has_room: set[tuple[str, str]] = set()
        for candidate in problem.choices.candidates(group.split, group.schedule):
            other_settings = (candidate.sharding, candidate.offload)
            if other_settings in has_room:
                self.reasons.add("recomputes although memory suffices", str(candidate))
                continue
            try:
                size = problem.needed_bytes(self._bytes(candidate), group.split)
            except ParallelError as error:
                self.reasons.add("the engine refuses it", f"{candidate}: {error}")
                return
            if size > problem.limit * TOLERANCE:
                too_large = min(
                    too_large or (size, candidate), (size, candidate), key=lambda e: e[0]
                )
                continue
            # Candidates come in order of recomputation. Once one fits with a margin, those that
            # recompute more with the same sharding and offloading can only be slower.
            if size * TOLERANCE <= problem.limit and problem.objective != "least-memory":
                has_room.add(other_settings)
            self._push(candidate, 2, self._key(self.steps.of(candidate).all, size, candidate))
        if too_large is not None:
            self._refuse(too_large[1], too_large[0])

    def _bytes(self, candidate: Candidate) -> list[RankMemory]:
        problem = self.problem
        return rank_bytes(
            candidate,
            self.steps.stages,
            problem.saved_bytes(candidate),
            moment_bytes=problem.moment_bytes,
            width=problem.width,
        )

    def _refuse(self, candidate: Candidate, size: int) -> None:
        text = f"{candidate}: {size / GIB:.3g} of {self.problem.limit / GIB:.3g} GiB"
        self.reasons.add("does not fit into memory", text)

    def _count(self, candidate: Candidate) -> FittingLayout | None:
        """Predict a candidate's memory and time with engines; None if it does not fit."""
        split = candidate.split
        ranks = split.layout.pipeline
        schedule_table = table(
            candidate.schedule, ranks, min(split.microbatches, SIMULATED_PER_RANK * ranks)
        )
        if isinstance(schedule_table, str):
            self.reasons.add(
                "the schedule needs other sizes", f"{candidate.schedule}: {schedule_table}"
            )
            return None
        try:
            memory = self.problem.predict(candidate)
        except (LayoutError, ParallelError) as error:
            self.reasons.add("the engine refuses it", f"{candidate}: {error}")
            return None
        needed = self.problem.needed_bytes(memory, split)
        if needed > self.problem.limit:
            self._refuse(candidate, needed)
            return None
        return FittingLayout(
            candidate=candidate,
            # With the times of all stages; the queue assumed the bubble of equal stages.
            seconds=self.steps.of(candidate, simulate=True),
            memory=tuple(memory),
            needed_bytes=needed,
        )
