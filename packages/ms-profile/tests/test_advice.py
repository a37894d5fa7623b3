"""Every rule fires on a trace with its fault and stays silent on a healthy one."""

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
    """Return named steps of `length` µs."""
    return [
        ("user_annotation", f"ProfilerStep#{n}", "main", n * length, length) for n in range(count)
    ]


def device_steps(*extra: Span, busy: float = 900.0) -> list[Span]:
    """Return four steps of 1 ms with one kernel of `busy` µs each, plus extra spans."""
    spans = steps()
    for n in range(4):
        spans.append(("kernel", "gemm", "stream 7", n * 1000.0 + 20, busy))
        spans.append(("cpu_op", "aten::mm", "main", n * 1000.0 + 1, 15.0))
        spans += [
            (c, name, thread, n * 1000.0 + start, duration)
            for c, name, thread, start, duration in extra
        ]
    return spans


def analyse_single(make: MakeTrace, spans: list[Span]) -> Analysis:
    """Analyse one rank."""
    return analyse_traces({0: make(spans)})


def analyse_pair(
    make: MakeTrace, compute: tuple[float, float], *, messages: int = 1 << 22
) -> Analysis:
    """Analyse two device ranks that compute for these µs per step and then reduce together."""
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


def runs_with_faults(make: MakeTrace) -> dict[str, Analysis]:
    """Return a run for each rule that the rule must fire on."""
    kernels = [("kernel", f"tiny_{k}", "stream 7", 20.0 + 20 * k, 4.0) for k in range(45)]
    burst = [
        ("kernel", "ncclDevKernel_AllReduce", "stream 9", 20.0 + 60 * k, 30.0) for k in range(10)
    ]
    small = {
        rank: make(
            [*steps(), *((c, n, w, s + 1000 * k, d) for k in range(4) for c, n, w, s, d in burst)],
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
        "host_bound": analyse_single(make, device_steps(launching, busy=300)),
        "small_kernels": analyse_single(make, device_steps(*kernels, busy=10.0)),
        "data_stalls": analyse_single(
            make, device_steps(("user_annotation", DATA, "main", 930, 60))
        ),
        "unhidden_collectives": analyse_single(make, device_steps(reducing, busy=500)),
        "stragglers": analyse_traces(simulate_run(ranks=4, fault=slow).traces),
        "synchronizing_calls": analyse_single(
            make,
            device_steps(
                ("cuda_runtime", "cudaStreamSynchronize", "main", 100, 40),
                ("cuda_runtime", "cudaStreamSynchronize", "main", 300, 40),
            ),
        ),
        "garbage_collection": analyse_traces(paused.traces, garbage=paused.garbage),
        "unbalanced_compute": analyse_pair(make, (800.0, 400.0)),
        "small_messages": analyse_traces(small),
        "device_allocations": analyse_single(
            make, device_steps(("cuda_runtime", "cudaMalloc", "main", 100, 50))
        ),
        "copies": analyse_single(
            make,
            device_steps(("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", "stream 7", 600, 200),
                         busy=500),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_rule_fires_on_its_fault_and_cites_it(rule: Rule, make_trace: MakeTrace) -> None:
    """The finding has the rule's name, a gain up to the wall time, and events of the trace."""
    finding = rule(runs_with_faults(make_trace)[rule.name])
    assert finding is not None
    assert finding.rule == rule.name
    assert 0 < finding.gain_share <= 1
    assert finding.gain_ns > 0
    assert finding.evidence
    assert all(event.duration_ns > 0 for event in finding.evidence)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_rule_is_silent_on_a_healthy_run(rule: Rule, make_trace: MakeTrace) -> None:
    """A busy device, balanced ranks with large messages, and equal simulated ranks."""
    busy = analyse_single(make_trace, device_steps(busy=970.0))
    even = analyse_pair(make_trace, (900.0, 900.0))
    assert rule(busy) is None
    assert rule(even) is None
    if rule.name != "unhidden_collectives":
        assert rule(analyse_traces(simulate_run(ranks=4, seed=7).traces)) is None


def test_there_are_at_least_eight_rules() -> None:
    """Each rule is in a file of its name with a module docstring."""
    assert len(RULES) >= 8
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        module = import_module(f"ms_profile.advice.rules.{rule.name}")
        assert module.RULE is rule
        assert module.__doc__


def test_advice_comes_with_the_largest_gain_first(make_trace: MakeTrace) -> None:
    """Findings are sorted by estimated gain."""
    gains = [finding.gain_ns for finding in advise(runs_with_faults(make_trace)["host_bound"])]
    assert gains == sorted(gains, reverse=True)
    assert gains


def test_evidence_is_on_the_timeline_despite_clock_offsets() -> None:
    """With clocks seconds apart, every cited event is within the run's steps."""
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
def test_copies_and_fills_are_not_allocations(
    make_trace: MakeTrace, name: str, counts: bool
) -> None:
    """Only driver calls that allocate or free memory count, despite similar names."""
    spans = device_steps(("cuda_runtime", name, "main", 100.0, 200.0))
    rules = {finding.rule for finding in advise(analyse_single(make_trace, spans))}
    assert ("device_allocations" in rules) == counts
