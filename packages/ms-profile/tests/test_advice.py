"""Every rule fires on a trace that shows its fault, and keeps quiet on one that doesn't."""

from collections.abc import Callable
from importlib import import_module

import pytest
from attrs import evolve
from simulation import Fault, simulate_run

from ms_profile.advice import RULES, advise
from ms_profile.advice.rule import Rule
from ms_profile.analysis.whole_run import Analysis, analyse_traces
from ms_profile.trace.columns import Trace

Span = tuple[str, str, int | str, float, float]
MakeTrace = Callable[..., Trace]
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def steps(count: int = 4, length: float = 1000.0) -> list[Span]:
    """Named steps of `length` µs."""
    return [
        ("user_annotation", f"ProfilerStep#{n}", "main", n * length, length) for n in range(count)
    ]


def device_steps(*more: Span, busy: float = 900.0) -> list[Span]:
    """Four steps of 1 ms whose device is busy for `busy` µs in one kernel, plus other spans."""
    found = steps()
    for n in range(4):
        found.append(("kernel", "gemm", "stream 7", n * 1000.0 + 20, busy))
        found.append(("cpu_op", "aten::mm", "main", n * 1000.0 + 1, 15.0))
        found += [
            (c, name, where, n * 1000.0 + start, long) for c, name, where, start, long in more
        ]
    return found


def single(make: MakeTrace, spans: list[Span]) -> Analysis:
    """Analyse one rank."""
    return analyse_traces({0: make(spans)})


def pair(make: MakeTrace, compute: tuple[float, float], *, messages: int = 1 << 22) -> Analysis:
    """Two device ranks that compute for these µs a step and then reduce together."""
    traces = {}
    for rank, busy in enumerate(compute):
        spans = steps()
        for n in range(4):
            spans.append(("kernel", "gemm", "stream 7", n * 1000.0, busy))
            end = n * 1000.0 + max(compute) + 30
            spans.append(
                ("kernel", "ncclDevKernel_AllReduce", "stream 9", n * 1000.0 + busy,
                 end - n * 1000.0 - busy)
            )  # fmt: skip
        traces[rank] = make(spans, rank=rank, host="one", messages=messages)
    return analyse_traces(traces)


def firing(make: MakeTrace) -> dict[str, Analysis]:
    """A run that each rule must fire on."""
    kernels = [("kernel", f"tiny_{k}", "stream 7", 20.0 + 20 * k, 4.0) for k in range(45)]
    many = [
        ("kernel", "ncclDevKernel_AllReduce", "stream 9", 20.0 + 60 * k, 30.0) for k in range(10)
    ]
    small = {
        rank: make(
            [*steps(), *((c, n, w, s + 1000 * k, d) for k in range(4) for c, n, w, s, d in many)],
            rank=rank, host="one", messages=64,
        )
        for rank in (0, 1)
    }  # fmt: skip
    slow = Fault(phase="data", rank=1, delay_ns=30_000_000)
    pause = Fault(phase="garbage", rank=0, delay_ns=10_000_000)
    paused = simulate_run(ranks=2, fault=pause)
    launching = ("cpu_op", "aten::add", "main", 500, 450)
    reducing = ("kernel", "ncclDevKernel_AllReduce", "stream 9", 600, 390)
    return {
        "host_bound": single(make, device_steps(launching, busy=300)),
        "small_kernels": single(make, device_steps(*kernels, busy=10.0)),
        "data_stalls": single(make, device_steps(("user_annotation", DATA, "main", 930, 60))),
        "unhidden_collectives": single(make, device_steps(reducing, busy=500)),
        "stragglers": analyse_traces(simulate_run(ranks=4, fault=slow).traces),
        "synchronizing_calls": single(
            make,
            device_steps(
                ("cuda_runtime", "cudaStreamSynchronize", "main", 100, 40),
                ("cuda_runtime", "cudaStreamSynchronize", "main", 300, 40),
            ),
        ),
        "garbage_collection": analyse_traces(paused.traces, garbage=paused.garbage),
        "unbalanced_compute": pair(make, (800.0, 400.0)),
        "small_messages": analyse_traces(small),
        "device_allocations": single(
            make, device_steps(("cuda_runtime", "cudaMalloc", "main", 100, 50))
        ),
        "copies": single(
            make,
            device_steps(("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", "stream 7", 600, 200),
                         busy=500),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_rule_fires_on_its_fault_and_cites_it(rule: Rule, make_trace: MakeTrace) -> None:
    """It names itself, gives a gain between 0 and the wall time, and cites events of the trace."""
    found = rule(firing(make_trace)[rule.name])
    assert found is not None
    assert found.rule == rule.name
    assert 0 < found.gain_share <= 1
    assert found.gain_ns > 0
    assert found.evidence
    assert all(one.duration_ns > 0 for one in found.evidence)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_rule_is_quiet_on_a_sound_run(rule: Rule, make_trace: MakeTrace) -> None:
    """A busy device, balanced ranks with large messages, and even simulated ranks trip no rule."""
    busy = single(make_trace, device_steps(busy=970.0))
    even = pair(make_trace, (900.0, 900.0))
    assert rule(busy) is None
    assert rule(even) is None
    if rule.name != "unhidden_collectives":
        assert rule(analyse_traces(simulate_run(ranks=4, seed=7).traces)) is None


def test_there_are_at_least_eight_rules() -> None:
    """Eight files or more hold a rule that is named as they are, and say in words what it sees."""
    assert len(RULES) >= 8
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        module = import_module(f"ms_profile.advice.rules.{rule.name}")
        assert module.RULE is rule
        assert module.__doc__


def test_advice_comes_with_the_largest_gain_first(make_trace: MakeTrace) -> None:
    """Findings are ordered by estimated gain."""
    gains = [one.gain_ns for one in advise(firing(make_trace)["host_bound"])]
    assert gains == sorted(gains, reverse=True)
    assert gains


def test_evidence_lies_on_the_timeline_whatever_the_ranks_clocks_say() -> None:
    """With clocks seconds apart, every event that a finding cites lies among the run's steps."""
    fault = Fault(phase="data", rank=2, delay_ns=30_000_000)
    traces = simulate_run(ranks=3, fault=fault, offsets_ns=(0.0, -2e9, 3e9)).traces
    run = analyse_traces({rank: evolve(trace, host="") for rank, trace in traces.items()})
    first, last = run.ranks[0].trace.span_ns
    cited = [event for finding in advise(run) for event in finding.evidence]
    assert {event.rank for event in cited} >= {2}
    assert all(first - 1e9 < event.start_ns < last + 1e9 for event in cited)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("cudaMalloc", True), ("cudaFree", True), ("cuMemCreate", True), ("cudaHostAlloc", True),
     ("cuMemcpyHtoDAsync", False), ("cudaMemcpyAsync", False), ("cuMemsetD8Async", False)],
)  # fmt: skip
def test_copies_and_fills_are_no_allocations(
    make_trace: MakeTrace, name: str, counts: bool
) -> None:
    """Only the driver's calls that take or give memory count, however alike the names are."""
    spans = device_steps(("cuda_runtime", name, "main", 100.0, 200.0))
    rules = {finding.rule for finding in advise(single(make_trace, spans))}
    assert ("device_allocations" in rules) == counts
