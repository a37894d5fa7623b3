"""The summary of a report as plain JSON values; None represents unknown values."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import asdict
from msgspec import structs

from ms_profile.advice.finding import Finding
from ms_profile.advice.rules import advise
from ms_profile.analysis.activity import PHASES
from ms_profile.analysis.memory import memory_growth, memory_timeline
from ms_profile.analysis.operators import kernel_table, operator_table
from ms_profile.analysis.transfers import find_slow_group, fit_transfers
from ms_profile.analysis.whole_run import Analysis, RankAnalysis
from ms_profile.links.matrix import LinkMatrix, find_slow_link
from ms_profile.metrics import METRICS
from ms_profile.report.waits import summarize_data, summarize_idle
from ms_profile.trace.steps import STEP

MAX_OPERATORS = 400
MAX_LEDGER_ROWS = 300


def build_summary(
    analysis: Analysis,
    *,
    title: str = "",
    links: LinkMatrix | None = None,
    findings: Sequence[Finding] | None = None,
    metrics: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Summarize an analysis for the report and for `--json`; times in ns, sizes in bytes.

    Args:
        analysis: result of `ms_profile.analyse`.
        title: title of the report; default: the name of the run.
        links: link matrix from `ms-profile link --out`.
        findings: advice to show. None: apply all rules.
        metrics: metrics to show. None: the run's metrics, or all if unknown.
    """
    advice = advise(analysis) if findings is None else findings
    run = analysis.run
    selected = metrics if metrics is not None else run.metrics if run is not None else None
    shown = {
        part for name in selected or METRICS if name in METRICS for part in METRICS[name].shows
    }
    return {
        "title": title or (run.name if run is not None else "Where the time goes"),
        "run": None if run is None else asdict(run),
        "metrics": list(selected or METRICS),
        "shown": sorted(shown),
        "phases": PHASES,
        "warnings": list(analysis.warnings),
        "ranks": [_rank(rank) for rank in analysis.ranks.values()],
        "operators": _operators(analysis, by_shape="shapes" in shown),
        "kernels": _kernels(analysis),
        "communication": _communication(analysis, links),
        "ledger": _ledger(analysis),
        "memory": [_memory(rank) for rank in analysis.ranks.values()],
        "data": summarize_data(analysis),
        "idle": summarize_idle(analysis),
        "advice": [_finding(finding) for finding in advice],
    }  # fmt: skip


def _rank(rank: RankAnalysis) -> dict[str, Any]:
    steps = [
        {"number": breakdown.step.number, "wall": breakdown.step.duration_ns,
         "phases": {
             name: None if name in rank.activity.unmeasured else time_ns
             for name, time_ns in breakdown.phases_ns.items()
         },
         "communication": breakdown.communication_ns, "hidden": breakdown.hidden_ns}
        for breakdown in rank.breakdowns
    ]  # fmt: skip
    return {
        "rank": rank.rank, "host": rank.trace.host, "spans": len(rank.trace),
        "file_bytes": rank.trace.file_bytes, "device": rank.activity.has_device, "steps": steps,
        "clock": None if rank.clock is None else structs.asdict(rank.clock),
    }  # fmt: skip


def _operators(analysis: Analysis, *, by_shape: bool) -> dict[str, Any]:
    """Aggregate all ranks' operators by name, and optionally by shape, most self time first."""
    # Calls, total, self and device time in ns, by name, category and shape.
    sums: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    has_device = False
    for rank in analysis.ranks.values():
        for row in operator_table(rank.trace, by_shape=by_shape):
            name = "ProfilerStep" if STEP.fullmatch(row.name) else row.name
            cell = sums[name, int(row.category), row.shape]
            cell[0] += row.calls
            cell[1] += row.total_ns
            cell[2] += row.self_ns
            cell[3] += row.device_ns or 0
            has_device |= row.device_ns is not None
    ordered = sorted(sums.items(), key=lambda item: -max(item[1][2], item[1][3]))
    rows = [[*key, *cell] for key, cell in ordered[:MAX_OPERATORS]]
    return {
        "rows": rows, "left_out": len(ordered) - len(rows), "device": has_device,
        "left_out_ns": sum(cell[2] for _, cell in ordered[MAX_OPERATORS:]),
        "self_ns": sum(cell[2] for _, cell in ordered),
    }  # fmt: skip


def _kernels(analysis: Analysis) -> list[list[Any]]:
    sums: dict[tuple[str, int], list[int]] = {}
    for rank in analysis.ranks.values():
        for row in kernel_table(rank.trace):
            # Calls, total, shortest and longest time in ns.
            cell = sums.setdefault((row.name, int(row.category)), [0, 0, row.shortest_ns, 0])
            cell[0] += row.calls
            cell[1] += row.total_ns
            cell[2] = min(cell[2], row.shortest_ns)
            cell[3] = max(cell[3], row.longest_ns)
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return [[*key, *cell] for key, cell in ordered[:MAX_OPERATORS]]


def _communication(analysis: Analysis, links: LinkMatrix | None) -> dict[str, Any]:
    ranks = list(analysis.ranks)
    column_of = {rank: column for column, rank in enumerate(ranks)}
    waits = np.zeros((len(ranks), len(ranks)))  # [i, j]: wait of rank i caused by rank j, in ns
    for charge in analysis.ledger.charges:
        waits[column_of[charge.waiting], column_of[charge.cause]] += charge.wait_ns
    # Count, and mean wait and transfer over the ranks, summed over the collectives, in ns.
    kinds: dict[tuple[str, str, int | None], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    ledger = analysis.ledger
    for collective, waited, transfer in zip(
        ledger.matched, ledger.wait_ns, ledger.transfer_ns, strict=True
    ):
        cell = kinds[collective.kind, collective.group, collective.size_bytes]
        cell[0] += 1
        cell[1] += sum(waited.values()) / len(waited)
        cell[2] += sum(transfer.values()) / len(transfer)
    seen = sum(len(rank.collectives) for rank in analysis.ranks.values())
    group = find_slow_group(ledger)
    slow = find_slow_link(links) if links is not None else None
    return {
        "ranks": ranks,
        "waits": waits.tolist() if ledger.matched else None,
        "kinds": [
            [*key, *cell] for key, cell in sorted(kinds.items(), key=lambda item: -item[1][2])
        ],
        "seen": seen,
        "fits": [
            asdict(fit, filter=lambda attribute, _: attribute.name != "fit")
            | structs.asdict(fit.fit)
            for fit in fit_transfers(ledger)
        ],
        "links": None if links is None else {
            "backend": links.backend, "world": links.world_size,
            "pairs": [[pair.first, pair.second, pair.fit.latency_s, pair.fit.bandwidth_bytes_per_s]
                      for pair in links.pairs],
        },
        "slow_group": None if group is None else {
            **asdict(group), "everyone": set(group.ranks) >= set(ranks),
        },
        "slow_link": None if slow is None else asdict(slow),
    }  # fmt: skip


def _ledger(analysis: Analysis) -> dict[str, Any]:
    ledger = analysis.ledger
    sums = [[rank, phase, wait_ns] for (rank, phase), wait_ns in ledger.charged_ns().items()]
    longest = sorted(range(len(ledger.matched)), key=lambda n: -sum(ledger.wait_ns[n].values()))[
        :MAX_LEDGER_ROWS
    ]
    causes: dict[int, dict[tuple[int, str], float]] = defaultdict(lambda: defaultdict(float))
    for charge in ledger.charges:
        causes[charge.collective][charge.cause, charge.phase] += charge.wait_ns
    rows = []
    for number in longest:
        collective = ledger.matched[number]
        # A collective may have several causes; the table shows the largest.
        main_cause = (
            max(causes[number].items(), key=lambda item: item[1])[0] if causes[number] else None
        )
        rows.append(
            # Times since 1970 as text: a number in JavaScript is exact only up to 2**53.
            [collective.kind, collective.size_bytes, str(min(collective.starts_ns.values())),
             sum(ledger.wait_ns[number].values()), sum(ledger.transfer_ns[number].values()),
             ledger.late[number], main_cause[0] if main_cause else None,
             main_cause[1] if main_cause else None]
        )  # fmt: skip
    return {
        "charged": sums, "waited": sorted(ledger.waited_ns().items()), "rows": rows,
        "matched": len(ledger.matched),
        "suspect": None if ledger.suspect is None else asdict(ledger.suspect),
    }  # fmt: skip


def _memory(rank: RankAnalysis) -> dict[str, Any]:
    series = [
        {"device": line.device, "at": (line.at_ns - line.at_ns[0]).tolist(),
         "low": line.low_bytes.tolist(), "high": line.high_bytes.tolist(),
         "peak": int(line.high_bytes.max())}
        for line in memory_timeline(rank.trace)
    ]  # fmt: skip
    peaks = [[peak.name, peak.size_bytes] for peak in memory_growth(rank.trace)]
    return {"rank": rank.rank, "series": series, "peaks": peaks}


def _finding(finding: Finding) -> dict[str, Any]:
    evidence = [
        [span.rank, span.name, str(span.start_ns), span.duration_ns] for span in finding.evidence
    ]
    return {**asdict(finding), "evidence": evidence}
