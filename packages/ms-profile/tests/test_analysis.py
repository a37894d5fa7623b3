"""Analysis of run time: breakdowns, the ledger, diagnosis of injected faults, clocks."""

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
from ms_profile.trace.records import Arguments, TraceEvent

MS = 1_000_000


def analyse_run(run: SimulatedRun) -> Analysis:
    """Analyse a simulated run, including garbage collections as seen by its recorder."""
    return analyse_traces(run.traces, garbage=run.garbage)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_real_runs_phases_sum_to_its_wall_time(traces_folder: Path, strategy: str) -> None:
    """In every step of two gloo ranks; all collectives are matched."""
    analysis = analyse(traces_folder / strategy)
    assert sorted(analysis.ranks) == [0, 1]
    assert analysis.warnings == ()
    for rank_analysis in analysis.ranks.values():
        assert len(rank_analysis.breakdowns) == 2
        for step in rank_analysis.breakdowns:
            assert sum(step.phases_ns.values()) == step.step.duration_ns
            assert all(amount >= 0 for amount in step.phases_ns.values())
        assert len(rank_analysis.collectives) == len(analysis.matched) > 0
        assert {"copy", "launch", "synchronize"} < set(rank_analysis.activity.unmeasured)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_transfer_and_wait_sum_to_each_collectives_time(traces_folder: Path, strategy: str) -> None:
    """A rank's time in a collective is its wait plus its transfer, and all waits are charged."""
    ledger = analyse(traces_folder / strategy).ledger
    for match, wait, transfer in zip(
        ledger.matched, ledger.wait_ns, ledger.transfer_ns, strict=True
    ):
        for rank in wait:
            assert wait[rank] + transfer[rank] == match.ends_ns[rank] - match.starts_ns[rank]
            assert wait[rank] >= 0
    assert sum(ledger.charged_ns().values()) == pytest.approx(sum(ledger.waited_ns().values()))


@pytest.mark.parametrize("phase", ["data", "compute", "garbage", "host"])
@pytest.mark.parametrize("delay_ms", [5, 50, 1000])
@pytest.mark.parametrize(("ranks", "grid"), [(2, 0), (8, 0), (8, 2)])
def test_the_slow_rank_and_phase_are_named(
    phase: str, delay_ms: int, ranks: int, grid: int
) -> None:
    """The fault's rank and phase, with high confidence, despite skewed and drifting clocks."""
    random = np.random.default_rng(ranks + delay_ms)
    offsets, drifts = random.uniform(-3e9, 3e9, ranks), random.uniform(-5e-5, 5e-5, ranks)
    fault = Fault(phase=phase, rank=ranks - 1, delay_ns=delay_ms * MS)  # type: ignore[arg-type]
    run = simulate_run(
        ranks=ranks, grid=grid, fault=fault, offsets_ns=list(offsets), drifts=list(drifts), seed=1
    )
    verdict = diagnose(analyse_run(run).ledger)
    assert verdict is not None
    assert (verdict.ranks, verdict.phase) == ((ranks - 1,), phase)
    assert verdict.confidence > 0.9


def test_overlapping_collectives_do_not_hide_the_cause_of_a_delay() -> None:
    """At least 90% of a late rank's buckets are charged to the preceding wait for data.

    Its reductions overlap the backward pass; only the last one delays other ranks.
    """
    fault = Fault(phase="data", rank=7, delay_ns=5 * MS)
    charged = analyse_run(simulate_run(ranks=8, fault=fault, seed=1)).ledger.charged_ns()
    assert charged[7, "data"] > 0.9 * sum(charged.values())


def test_pauses_before_the_traced_steps_are_ignored() -> None:
    """Pauses recorded before the window do not change the diagnosis."""
    run = simulate_run(ranks=2, fault=Fault(phase="compute", rank=1, delay_ns=60 * MS), seed=1)
    window_start = run.traces[0].span_ns[0]
    earlier = np.array([[window_start - 2000 * MS, window_start - 1000 * MS]])
    garbage = {
        rank: np.concatenate([earlier, in_window]) for rank, in_window in run.garbage.items()
    }
    expected = analyse_run(run).ledger.charged_ns()
    assert analyse_traces(run.traces, garbage={0: garbage[0]}).ledger.charged_ns() == expected
    assert analyse_traces(run.traces, garbage=garbage).ledger.charged_ns() == expected
    assert expected[1, "compute"] > 0.9 * sum(expected.values())


def test_garbage_collection_before_a_late_ranks_first_step_counts() -> None:
    """Rank 1 collects since before its first traced step, while rank 0 already waits in it."""
    computing = {0: np.array([[0, 2]]) * MS, 1: np.array([[152, 153]]) * MS}
    phases = {rank: {"compute": compute} for rank, compute in computing.items()}
    phases[1]["garbage"] = np.array([[-900, -400], [1, 151]]) * MS
    collective = MatchedCollective(
        key=0, kind="all_reduce", group="", size_bytes=8, starts_ns={0: 2 * MS, 1: 153 * MS},
        ends_ns={0: 154 * MS, 1: 154 * MS}, rows={0: 0, 1: 0},
    )  # fmt: skip
    charged = build_ledger([collective], phases, {0: 0, 1: 151 * MS}).charged_ns()
    assert {key: wait / MS for key, wait in charged.items()} == pytest.approx(
        {(1, "garbage"): 149, (1, "host"): 1, (1, "compute"): 1}
    )


def test_a_late_end_of_a_collective_hides_no_cause() -> None:
    """Rank 1 computes before two collectives and reports the end of the first 5 ms after rank 0.

    Rank 0 has entered the second by then. Rank 1's 30 ms before the first came before they met, so
    rank 0's wait in the second is 5 ms of the link and 44 ms of compute.
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
    phases = {rank: {"collective": collective} for rank, collective in communicating.items()}
    phases[1]["compute"] = computing
    ledger = build_ledger([first, second], phases)
    second_ms = {c.phase: c.wait_ns / MS for c in ledger.charges if c.collective == 1}
    assert second_ms == pytest.approx({"compute": 44, "link": 5})


@pytest.mark.parametrize(("ranks", "grid", "every_nth"), [(2, 0, 3), (4, 2, 1), (8, 2, 1)])
def test_slow_transfers_are_distinguished_from_slow_ranks(
    ranks: int, grid: int, every_nth: int
) -> None:
    """A slow link is charged to the link, and the named ranks include the affected one."""
    fault = Fault(phase="link", rank=1, delay_ns=30 * MS, every=every_nth)
    verdict = diagnose(
        analyse_run(simulate_run(ranks=ranks, grid=grid, fault=fault, seed=2)).ledger
    )
    assert verdict is not None
    assert verdict.phase == "link"
    assert 1 in verdict.ranks


def test_without_a_fault_no_rank_is_accused() -> None:
    """For equal ranks no diagnosis has 95% confidence and costs 2% of all ranks' time.

    With a fault of 30 ms on one rank it does.
    """

    def is_accused(run: SimulatedRun) -> bool:
        analysis = analyse_run(run)
        verdict = diagnose(analysis.ledger)
        total_ns = sum(rank_analysis.wall_ns for rank_analysis in analysis.ranks.values())
        return bool(verdict and verdict.confidence >= 0.95 and verdict.cost_ns >= 0.02 * total_ns)

    assert not any(is_accused(simulate_run(ranks=4, seed=seed)) for seed in range(10))
    fault = Fault(phase="compute", rank=2, delay_ns=30 * MS)
    assert is_accused(simulate_run(ranks=4, fault=fault, seed=0))


def test_clocks_of_simulated_traces_align_within_100_us() -> None:
    """Offsets of 3 s and drifts of 50 ppm are corrected to 100 µs at the 99th percentile."""
    offsets, drifts = [0.0, 3e9, -3e9, 1e8], [0.0, 5e-5, -5e-5, 2e-5]
    run = simulate_run(ranks=4, offsets_ns=offsets, drifts=drifts, steps=40, seed=3)
    errors = []
    for rank, rank_analysis in analyse_run(run).ranks.items():
        local_ns = rank_analysis.trace.start_ns - run.origin_ns
        true = (local_ns - offsets[rank]) / (1 + drifts[rank]) + run.origin_ns
        assert rank_analysis.clock is not None
        errors.extend(np.abs(rank_analysis.clock.correct(rank_analysis.trace.start_ns) - true))
    assert np.percentile(errors, 99) < 100_000


def test_unnamed_groups_are_distinguished() -> None:
    """In a 4 by 2 grid, gathers within rows are matched between two ranks, not eight."""
    analysis = analyse_run(simulate_run(ranks=8, grid=2, seed=4))
    members = {tuple(match.starts_ns) for match in analysis.matched if match.kind == "all_gather"}
    assert members == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {len(match.starts_ns) for match in analysis.matched if match.kind == "all_reduce"} == {8}


def test_communication_under_compute_is_hidden(make_trace: Callable[..., Trace]) -> None:
    """60 of 100 µs of a collective overlap kernels: 60% is hidden and 40 µs are exposed."""
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


def test_ranks_without_shared_collectives_give_a_warning(
    make_trace: Callable[..., Trace],
) -> None:
    """They get no common clock and no waits."""
    traces = {r: make_trace([("cpu_op", "aten::mm", 1, 0.0, 9.0)], rank=r) for r in (0, 1)}
    analysis = analyse_traces(traces)
    assert "cannot be compared" in analysis.warnings[0]
    assert analysis.matched == ()
    assert find_suspect(analysis.ledger) is None
    assert diagnose(analysis.ledger) is None


def test_unequal_windows_pair_by_step(traces_folder: Path) -> None:
    """If a rank's trace lacks the last step, the other collectives are still matched."""
    from attrs import evolve

    from ms_profile.trace.reader import read_trace

    traces = {r: read_trace(traces_folder / "ddp" / f"rank-0000{r}.json.gz") for r in (0, 1)}
    full_analysis = analyse_traces(traces)
    last_step_ns = full_analysis.ranks[1].activity.steps[-1].start_ns
    rows = np.flatnonzero(traces[1].start_ns < last_step_ns)
    columns = ("start_ns", "duration_ns", "name", "category", "thread", "external", "correlation",
               "shape", "moved_bytes")  # fmt: skip
    notes = {
        new: traces[1].messages[old] for new, old in enumerate(rows) if old in traces[1].messages
    }
    short = evolve(traces[1], messages=notes, **{c: getattr(traces[1], c)[rows] for c in columns})
    analysis = analyse_traces({0: traces[0], 1: short})
    assert len(analysis.matched) == len(full_analysis.matched) // 2 > 0


def test_the_memory_timeline_keeps_the_peak(traces_folder: Path) -> None:
    """The line's maximum is the largest total that the allocator reported."""
    trace = analyse(traces_folder / "ddp").ranks[0].trace
    (line,) = memory_timeline(trace)
    assert line.device == -1
    assert line.high_bytes.max() == trace.memory.allocated_bytes.max() > 0
    assert memory_growth(trace)[0].size_bytes > 0


def test_transfer_fits_recover_latency_and_bandwidth() -> None:
    """Within 10%, from noisy transfers of several sizes."""
    random = np.random.default_rng(0)
    sizes = np.repeat([8.0, 65536.0, 1048576.0, 4194304.0], 5)
    times = (40e-6 + sizes / 2e9) * random.normal(1, 0.03, len(sizes))
    fit = fit_link(sizes, times)
    assert fit.latency_s == pytest.approx(40e-6, rel=0.1)
    assert fit.bandwidth_bytes_per_s == pytest.approx(2e9, rel=0.1)
    fits = fit_transfers(analyse_run(simulate_run(ranks=4, seed=5)).ledger)
    assert fits == ()  # a single size per kind cannot fit a line


def test_a_slow_link_is_named_but_not_in_an_even_matrix() -> None:
    """A pair with a third of the bandwidth is named; pairs within 10% of each other are not."""

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

    slow_link = find_slow_link(matrix((1, 3)))
    assert slow_link is not None
    assert (slow_link.first, slow_link.second) == (1, 3)
    assert slow_link.ratio == pytest.approx(3, rel=0.15)
    assert find_slow_link(matrix(None)) is None


def test_folders_without_traces_are_refused_and_bad_files_are_skipped(
    tmp_path: Path, traces_folder: Path
) -> None:
    """A folder without traces is an error; a bad file next to traces is a warning."""
    with pytest.raises(TraceError, match="has no traces"):
        analyse(tmp_path)
    good = traces_folder / "ddp" / "rank-00000.json.gz"
    (tmp_path / "rank-0.json.gz").write_bytes(good.read_bytes())
    (tmp_path / "settings.json").write_text('{"a": 1}')
    analysis = analyse(tmp_path)
    assert list(analysis.ranks) == [0]
    assert any("settings.json" in warning for warning in analysis.warnings)


def test_memory_is_charged_to_the_innermost_open_operator() -> None:
    """After a child ends its parent continues; `aten::empty` counts for its caller."""
    builder = TraceBuilder()
    spans = [("aten::linear", 0.0, 100.0), ("aten::t", 5.0, 10.0), ("aten::addmm", 40.0, 30.0),
             ("aten::empty", 45.0, 2.0), ("aten::empty", 120.0, 2.0)]  # fmt: skip
    changes = [(8.0, 1), (20.0, 10), (46.0, 100), (121.0, 1000), (500.0, 9999)]
    builder.add(
        [TraceEvent(ph="X", cat="cpu_op", name=n, ts=start, dur=dur) for n, start, dur in spans]
        + [TraceEvent(ph="i", name="[memory]", ts=start, args=Arguments(size_bytes=size))
           for start, size in changes]
    )  # fmt: skip
    sizes = {growth.name: growth.size_bytes for growth in memory_growth(builder.finish({}, (), 0))}
    expected = {"aten::t": 1, "aten::linear": 10, "aten::addmm": 100, "aten::empty": 1000}
    assert sizes == expected
