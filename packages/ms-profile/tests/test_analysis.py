"""Where the time goes: breakdowns, the ledger, verdicts on injected faults, clocks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from simulation import Fault, SimulatedRun, simulate_run

from ms_profile.analysis.collectives import MatchedCollective
from ms_profile.analysis.ledger import build_ledger, find_suspect
from ms_profile.analysis.memory import memory_growth, memory_timeline
from ms_profile.analysis.transfers import diagnose, fit_transfers
from ms_profile.analysis.whole_run import Analysis, analyse, analyse_traces
from ms_profile.errors import TraceError
from ms_profile.links.fit import fit_link
from ms_profile.links.matrix import LinkMatrix, PairLink, find_slow_link
from ms_profile.trace.builder import TraceBuilder
from ms_profile.trace.columns import Trace
from ms_profile.trace.records import Arguments, Record

MS = 1_000_000


def analysed(run: SimulatedRun) -> Analysis:
    """Analyse a simulated run with what its recorder would know of garbage collection."""
    return analyse_traces(run.traces, garbage=run.garbage)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_real_runs_phases_sum_to_its_wall_time(traces_folder: Path, kind: str) -> None:
    """Two gloo ranks: every step's phases sum to its wall time, and collectives are matched."""
    found = analyse(traces_folder / kind)
    assert sorted(found.ranks) == [0, 1]
    assert found.warnings == ()
    for one in found.ranks.values():
        assert len(one.breakdowns) == 2
        for step in one.breakdowns:
            assert sum(step.phases_ns.values()) == step.step.duration_ns
            assert all(amount >= 0 for amount in step.phases_ns.values())
        assert len(one.collectives) == len(found.matched) > 0
        assert {"copy", "launch", "synchronize"} < set(one.activity.unmeasured)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_transfer_and_wait_sum_to_each_collectives_time(traces_folder: Path, kind: str) -> None:
    """Each rank's part in a collective is its wait plus its transfer; no charge is lost."""
    ledger = analyse(traces_folder / kind).ledger
    for one, wait, transfer in zip(ledger.matched, ledger.wait_ns, ledger.transfer_ns, strict=True):
        for rank in wait:
            assert wait[rank] + transfer[rank] == one.ends_ns[rank] - one.starts_ns[rank]
            assert wait[rank] >= 0
    assert sum(ledger.charged_ns().values()) == pytest.approx(sum(ledger.waited_ns().values()))


@pytest.mark.parametrize("phase", ["data", "compute", "garbage", "host"])
@pytest.mark.parametrize("delay_ms", [5, 50, 1000])
@pytest.mark.parametrize(("ranks", "grid"), [(2, 0), (8, 0), (8, 2)])
def test_the_slow_rank_and_phase_are_named(
    phase: str, delay_ms: int, ranks: int, grid: int
) -> None:
    """With skewed, drifting clocks the fault's rank and phase are named, and with confidence."""
    random = np.random.default_rng(ranks + delay_ms)
    offsets, drifts = random.uniform(-3e9, 3e9, ranks), random.uniform(-5e-5, 5e-5, ranks)
    fault = Fault(phase=phase, rank=ranks - 1, delay_ns=delay_ms * MS)  # type: ignore[arg-type]
    run = simulate_run(
        ranks=ranks, grid=grid, fault=fault, offsets_ns=list(offsets), drifts=list(drifts), seed=1
    )
    verdict = diagnose(analysed(run).ledger)
    assert verdict is not None
    assert (verdict.ranks, verdict.phase) == ((ranks - 1,), phase)
    assert verdict.confidence > 0.9


def test_collectives_beside_compute_do_not_hide_where_the_delay_began() -> None:
    """All buckets of a late rank are charged to the wait for data that preceded them: 90% or more.

    Its reductions go on beside the backward pass; none of them but the last holds a rank up.
    """
    fault = Fault(phase="data", rank=7, delay_ns=5 * MS)
    charged = analysed(simulate_run(ranks=8, fault=fault, seed=1)).ledger.charged_ns()
    assert charged[7, "data"] > 0.9 * sum(charged.values())


def test_pauses_outside_the_traced_steps_blame_nobody() -> None:
    """What the recorder saw before a window on the rank that waits leaves the verdict as it is."""
    run = simulate_run(ranks=2, fault=Fault(phase="compute", rank=1, delay_ns=60 * MS), seed=1)
    begin = run.traces[0].span_ns[0]
    earlier = np.array([[begin - 2000 * MS, begin - 1000 * MS]])
    known = {rank: np.concatenate([earlier, own]) for rank, own in run.garbage.items()}
    alone = analysed(run).ledger.charged_ns()
    assert analyse_traces(run.traces, garbage={0: known[0]}).ledger.charged_ns() == alone
    assert analyse_traces(run.traces, garbage=known).ledger.charged_ns() == alone
    assert alone[1, "compute"] > 0.9 * sum(alone.values())


def test_garbage_before_a_late_ranks_own_first_step_is_known() -> None:
    """Rank 1 collects from before its first traced step on; rank 0 waits in that step already."""
    computing = {0: np.array([[0, 2]]) * MS, 1: np.array([[152, 153]]) * MS}
    phases = {rank: {"compute": own} for rank, own in computing.items()}
    phases[1]["garbage"] = np.array([[-900, -400], [1, 151]]) * MS
    first = MatchedCollective(
        key=0, kind="all_reduce", group="", size_bytes=8, starts_ns={0: 2 * MS, 1: 153 * MS},
        ends_ns={0: 154 * MS, 1: 154 * MS}, rows={0: 0, 1: 0},
    )  # fmt: skip
    charged = build_ledger([first], phases, {0: 0, 1: 151 * MS}).charged_ns()
    assert {key: wait / MS for key, wait in charged.items()} == pytest.approx(
        {(1, "garbage"): 149, (1, "host"): 1, (1, "compute"): 1}
    )


def test_a_collective_that_is_reported_late_hides_no_cause() -> None:
    """Rank 1 computes before two collectives, and reports the end of the first 5 ms after rank 0.

    Rank 0 has entered the second by then. Rank 1's 30 ms before the first came before they met, so
    of what it waits in the second 5 ms are the link's and 44 ms compute's.
    """
    computing = np.array([[0, 30], [36, 80]]) * MS
    first = MatchedCollective(
        key=0, kind="all_reduce", group="", size_bytes=8, starts_ns={0: 0, 1: 30 * MS},
        ends_ns={0: 31 * MS, 1: 36 * MS}, rows={0: 0, 1: 0},
    )  # fmt: skip
    second = evolve(
        first, key=1, starts_ns={0: 31 * MS, 1: 80 * MS}, ends_ns={0: 81 * MS, 1: 81 * MS}
    )
    communicating = {0: np.array([[0, 81]]) * MS, 1: np.array([[30, 36], [80, 81]]) * MS}
    phases = {rank: {"collective": own} for rank, own in communicating.items()}
    phases[1]["compute"] = computing
    ledger = build_ledger([first, second], phases)
    of_second = {c.phase: c.wait_ns / MS for c in ledger.charges if c.collective == 1}
    assert of_second == pytest.approx({"compute": 44, "link": 5})


@pytest.mark.parametrize(("ranks", "grid", "every"), [(2, 0, 3), (4, 2, 1), (8, 2, 1)])
def test_slow_transfers_are_told_from_slow_ranks(ranks: int, grid: int, every: int) -> None:
    """A slow link is charged to the link, and the ranks named include the one it belongs to."""
    fault = Fault(phase="link", rank=1, delay_ns=30 * MS, every=every)
    verdict = diagnose(analysed(simulate_run(ranks=ranks, grid=grid, fault=fault, seed=2)).ledger)
    assert verdict is not None
    assert verdict.phase == "link"
    assert 1 in verdict.ranks


def test_without_a_fault_nobody_is_accused() -> None:
    """On equal ranks no verdict reaches a confidence of 95% and a cost of 2% of all ranks' time.

    With a fault of 30 ms on one rank it does.
    """

    def is_accused(run: SimulatedRun) -> bool:
        found = analysed(run)
        verdict = diagnose(found.ledger)
        total_ns = sum(one.wall_ns for one in found.ranks.values())
        return bool(verdict and verdict.confidence >= 0.95 and verdict.cost_ns >= 0.02 * total_ns)

    assert not any(is_accused(simulate_run(ranks=4, seed=seed)) for seed in range(10))
    fault = Fault(phase="compute", rank=2, delay_ns=30 * MS)
    assert is_accused(simulate_run(ranks=4, fault=fault, seed=0))


def test_clocks_of_simulated_traces_align_within_100_us() -> None:
    """3 s of offset and 50 ppm of drift are taken out to within 100 µs at the 99th percentile."""
    offsets, drifts = [0.0, 3e9, -3e9, 1e8], [0.0, 5e-5, -5e-5, 2e-5]
    run = simulate_run(ranks=4, offsets_ns=offsets, drifts=drifts, steps=40, seed=3)
    errors = []
    for rank, one in analysed(run).ranks.items():
        own = one.trace.start_ns - run.origin_ns
        true = (own - offsets[rank]) / (1 + drifts[rank]) + run.origin_ns
        assert one.clock is not None
        errors.extend(np.abs(one.clock.correct(one.trace.start_ns) - true))
    assert np.percentile(errors, 99) < 100_000


def test_groups_that_the_backend_does_not_name_are_told_apart() -> None:
    """In a grid of 4 by 2 the gatherings of rows are matched of two ranks, not of eight."""
    found = analysed(simulate_run(ranks=8, grid=2, seed=4))
    members = {tuple(one.starts_ns) for one in found.matched if one.kind == "all_gather"}
    assert members == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {len(one.starts_ns) for one in found.matched if one.kind == "all_reduce"} == {8}


def test_hidden_communication_is_what_compute_covers(make_trace: Callable[..., Trace]) -> None:
    """60 of 100 µs of a collective lie under kernels: 60% is hidden and 40 µs count as exposed."""
    trace = make_trace(
        [
            ("user_annotation", "ProfilerStep#1", "main", 0.0, 200.0),
            ("kernel", "gemm", "stream 7", 10.0, 100.0),
            ("kernel", "ncclDevKernel_AllReduce_Sum", "stream 9", 50.0, 100.0),
            ("cpu_op", "aten::mm", "main", 0.0, 8.0),
            ("cuda_runtime", "cudaDeviceSynchronize", "main", 160.0, 30.0),
        ]
    )
    (step,) = analyse_traces({0: trace}).ranks[0].breakdowns
    assert step.hidden_share == pytest.approx(0.6)
    expected = {"compute": 100, "collective": 40, "synchronize": 30, "launch": 8, "host": 22}
    assert {k: v / 1000 for k, v in step.phases_ns.items() if v} == expected


def test_ranks_without_shared_collectives_are_said_to_be_apart(
    make_trace: Callable[..., Trace],
) -> None:
    """Two ranks that share nothing get no common clock, no waits and a warning."""
    traces = {r: make_trace([("cpu_op", "aten::mm", 1, 0.0, 9.0)], rank=r) for r in (0, 1)}
    found = analyse_traces(traces)
    assert "cannot be compared" in found.warnings[0]
    assert found.matched == ()
    assert find_suspect(found.ledger) is None
    assert diagnose(found.ledger) is None


def test_unequal_windows_pair_by_step(traces_folder: Path) -> None:
    """A rank whose trace lacks its last step still pairs the collectives of the other."""
    from attrs import evolve

    from ms_profile.trace.reader import read_trace

    traces = {r: read_trace(traces_folder / "ddp" / f"rank-0000{r}.json.gz") for r in (0, 1)}
    whole = analyse_traces(traces)
    last = whole.ranks[1].activity.steps[-1].start_ns
    keep = np.flatnonzero(traces[1].start_ns < last)
    columns = ("start_ns", "duration_ns", "name", "category", "thread", "external", "correlation",
               "shape", "moved_bytes")  # fmt: skip
    notes = {new: traces[1].notes[old] for new, old in enumerate(keep) if old in traces[1].notes}
    short = evolve(traces[1], notes=notes, **{c: getattr(traces[1], c)[keep] for c in columns})
    found = analyse_traces({0: traces[0], 1: short})
    assert len(found.matched) == len(whole.matched) // 2 > 0


def test_the_memory_timeline_keeps_the_peak(traces_folder: Path) -> None:
    """The line's highest point is the largest total that the allocator reported."""
    found = analyse(traces_folder / "ddp").ranks[0].trace
    (line,) = memory_timeline(found)
    assert line.device == -1
    assert line.high_bytes.max() == found.memory.allocated_bytes.max() > 0
    assert memory_growth(found)[0].size_bytes > 0


def test_transfers_fit_the_line_they_were_made_from() -> None:
    """Links' latency and bandwidth come back within 10% from noisy transfers of two sizes."""
    random = np.random.default_rng(0)
    sizes = np.repeat([8.0, 65536.0, 1048576.0, 4194304.0], 5)
    times = (40e-6 + sizes / 2e9) * random.normal(1, 0.03, len(sizes))
    fit = fit_link(sizes, times)
    assert fit.latency_s == pytest.approx(40e-6, rel=0.1)
    assert fit.bandwidth_bytes_per_s == pytest.approx(2e9, rel=0.1)
    found = fit_transfers(analysed(simulate_run(ranks=4, seed=5)).ledger)
    assert found == ()  # one size a kind makes no line


def test_the_slow_link_is_named_and_an_even_matrix_names_none() -> None:
    """One pair at a third of the bandwidth is named; pairs within 10% of each other are not."""

    def matrix(slow: tuple[int, int] | None) -> LinkMatrix:
        random = np.random.default_rng(1)
        sizes = (8, 16384, 1048576, 4194304)
        pairs = []
        for first in range(4):
            for second in range(first + 1, 4):
                rate = 1e9 if (first, second) == slow else 3e9
                times = tuple((30e-6 + s / rate) * random.normal(1, 0.03) for s in sizes)
                fit = fit_link(sizes, times)
                pairs.append(PairLink(first=first, second=second, fit=fit, sizes_bytes=sizes,
                                      times_s=times))  # fmt: skip
        return LinkMatrix(world_size=4, backend="gloo", hosts=("a",) * 4, pairs=tuple(pairs))

    found = find_slow_link(matrix((1, 3)))
    assert found is not None
    assert (found.first, found.second) == (1, 3)
    assert found.ratio == pytest.approx(3, rel=0.15)
    assert find_slow_link(matrix(None)) is None


def test_folders_without_traces_are_refused_and_bad_files_are_skipped(
    tmp_path: Path, traces_folder: Path
) -> None:
    """A folder without traces is an error; beside good traces a bad one is a warning."""
    with pytest.raises(TraceError, match="has no traces"):
        analyse(tmp_path)
    good = traces_folder / "ddp" / "rank-00000.json.gz"
    (tmp_path / "rank-0.json.gz").write_bytes(good.read_bytes())
    (tmp_path / "settings.json").write_text('{"a": 1}')
    found = analyse(tmp_path)
    assert list(found.ranks) == [0]
    assert any("settings.json" in warning for warning in found.warnings)


def test_memory_belongs_to_the_operator_that_is_open_and_not_to_who_allocates_for_it() -> None:
    """After a child ended, its parent goes on; `aten::empty` stands for the one that called it."""
    builder = TraceBuilder()
    spans = [("aten::linear", 0.0, 100.0), ("aten::t", 5.0, 10.0), ("aten::addmm", 40.0, 30.0),
             ("aten::empty", 45.0, 2.0), ("aten::empty", 120.0, 2.0)]  # fmt: skip
    changes = [(8.0, 1), (20.0, 10), (46.0, 100), (121.0, 1000), (500.0, 9999)]
    builder.add(
        [Record(ph="X", cat="cpu_op", name=n, ts=at, dur=long) for n, at, long in spans]
        + [Record(ph="i", name="[memory]", ts=at, args=Arguments(size_bytes=size))
           for at, size in changes]
    )  # fmt: skip
    found = {one.name: one.size_bytes for one in memory_growth(builder.finish({}, (), 0))}
    expected = {"aten::t": 1, "aten::linear": 10, "aten::addmm": 100, "aten::empty": 1000}
    assert found == expected
