"""Databases of nsys and of the Ascend profiler give the report of the JSON of the same run."""

import os
import random
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from profiler_databases import (
    simulate,
    write_ascend_db,
    write_ascend_json,
    write_kineto,
    write_nsys,
)

from ms_profile.advice import advise
from ms_profile.analysis.whole_run import Analysis, analyse
from ms_profile.cli import main
from ms_profile.errors import TraceError
from ms_profile.report import build_summary
from ms_profile.trace.reader import read_trace
from ms_profile.vendors.category import Category


def report_of(analysis: Analysis) -> dict[str, Any]:
    """Everything that the report shows, except for the size of the files."""
    summary = build_summary(analysis, title="run")
    for rank in summary["ranks"]:
        rank["file_bytes"] = 0
    return summary | {"advice": advise(analysis), "matched": len(analysis.matched), "run": None}


def test_an_nsys_export_gives_the_report_of_kinetos_trace(tmp_path: Path) -> None:
    """Two ranks: steps, breakdown, operators with device times, kernels, waits, advice."""
    kineto, nsys = tmp_path / "kineto", tmp_path / "nsys"
    kineto.mkdir()
    nsys.mkdir()
    for rank in (0, 1):
        spans = simulate("cuda", rank=rank)
        write_kineto(kineto / f"rank-{rank}.json", spans, rank=rank)
        write_nsys(nsys / f"rank-{rank}.sqlite", spans)
    expected, got = analyse(kineto), analyse(nsys)
    assert len(got.matched) == 5
    assert got.ledger.suspect == expected.ledger.suspect
    report = report_of(got)
    assert report == report_of(expected)
    assert report["shown"]
    assert [len(rank["steps"]) for rank in report["ranks"]] == [5, 5]
    for rank in (0, 1):
        ours, theirs = got.ranks[rank].trace, expected.ranks[rank].trace
        assert len(ours) == len(theirs)
        for column in ("start_ns", "duration_ns", "category", "correlation", "moved_bytes"):
            assert getattr(ours, column).tolist() == getattr(theirs, column).tolist(), column


def test_ascends_databases_give_the_report_of_trace_view(tmp_path: Path) -> None:
    """Found in the profiler's output folders, with times that are text in some versions."""
    for rank in (0, 1):
        spans = simulate("npu", rank=rank)
        folder = f"host_{rank}_ascend_pt/ASCEND_PROFILER_OUTPUT"
        write_ascend_json(tmp_path / "json" / f"rank{rank}" / "trace_view.json", spans)
        write_ascend_db(tmp_path / "db" / folder / f"ascend_pytorch_profiler_{rank}.db", spans,
                        rank=rank)  # fmt: skip
    got = analyse(tmp_path / "db")
    assert sorted(got.ranks) == [0, 1]
    for rank in (0, 1):
        (json_only,) = analyse(tmp_path / "json" / f"rank{rank}" / "trace_view.json").ranks.values()
        trace, expected = got.ranks[rank].trace, json_only.trace
        for column in ("start_ns", "duration_ns", "category"):
            assert getattr(trace, column).tolist() == getattr(expected, column).tolist(), column
        assert [*map(trace.name_of, range(len(trace)))] == [
            *map(expected.name_of, range(len(expected)))
        ]
    alone = analyse(tmp_path / "json" / "rank0" / "trace_view.json")
    from_db = analyse(next(tmp_path.glob("db/*0_ascend_pt/*/*.db")))
    assert report_of(from_db) == report_of(alone)
    assert len(from_db.ranks[0].breakdowns) == 5
    assert from_db.ranks[0].phase_ns("compute") > 0
    assert from_db.ranks[0].phase_ns("collective") > 0


def test_databases_of_msprof_have_a_rank_and_no_operators(tmp_path: Path) -> None:
    """`msprof_*.db`, found in the profiler's folders; the rank is in a table."""
    path = tmp_path / "PROF_000001/msprof_20261127.db"
    write_ascend_db(path, simulate("npu"), rank=5)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE PYTORCH_API")
    (rank,) = analyse(tmp_path).ranks.values()
    assert rank.rank == 5
    assert len(rank.trace.rows(Category.OPERATOR)) == 0
    assert len(rank.trace.rows(Category.KERNEL)) == 25
    assert len(rank.collectives) == 5


def test_memory_of_an_ascend_database_is_shown(tmp_path: Path) -> None:
    """OP_MEMORY has the allocator's totals; blocks that are never released end open."""
    path = write_ascend_db(tmp_path / "ascend_pytorch_profiler_3.db", simulate("npu", steps=1))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "CREATE TABLE OP_MEMORY (name, size, allocationTime, releaseTime, deviceId, addr, "
            "allocationTotalAllocated, allocationTotalReserved, releaseTotalAllocated, "
            "releaseTotalReserved)"
        )
        at = 1_760_000_000_006_000_000
        connection.executemany(
            "INSERT INTO OP_MEMORY VALUES (1, ?, ?, ?, 0, ?, ?, 4096, ?, 4096)",
            [(1024, at, at + 900, 1, 1024, 2048), (2048, at + 100, 0, 2, 3072, 0)],
        )
    trace = read_trace(path)
    assert trace.rank == 3
    assert trace.memory.change_bytes.tolist() == [1024, 2048, -1024]
    assert trace.memory.allocated_bytes.tolist() == [1024, 3072, 2048]


def test_an_export_of_several_processes_shows_one_and_says_so(tmp_path: Path) -> None:
    """The report shows the process with the most kernels."""
    path = write_nsys(tmp_path / "report.sqlite", simulate("cuda"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT start, end, deviceId, contextId, "
            f"streamId, correlationId, {77 << 24}, demangledName, shortName FROM "
            "CUPTI_ACTIVITY_KIND_KERNEL LIMIT 3"
        )
    trace = read_trace(path)
    assert len(trace) == len(simulate("cuda"))
    assert "has kernels of 2 processes; process 4242 is shown" in trace.warnings[0]


MSPROF_PYTHON = os.environ.get("MS_MSPROF_PYTHON", "")


@pytest.mark.slow
@pytest.mark.skipif(not MSPROF_PYTHON, reason="needs msprof-analyze; run nox -s msprof")
def test_msprof_analyze_agrees_on_calls_and_collectives(tmp_path: Path) -> None:
    """The vendor's tool on the same databases: total time and count per collective and rank."""
    totals = {}
    for rank in (0, 1):
        spans = simulate("npu", rank=rank)
        folder = tmp_path / f"runs/host_{rank}_ascend_pt/ASCEND_PROFILER_OUTPUT"
        path = write_ascend_db(folder / f"ascend_pytorch_profiler_{rank}.db", spans, rank=rank)
        (folder.parent / f"profiler_info_{rank}.json").write_text('{"config": {}}')
        (folder.parent / "profiler_metadata.json").write_text("{}")
        trace = read_trace(path)
        rows = trace.rows(Category.COLLECTIVE, Category.RUNTIME)
        for name, duration in zip(map(trace.name_of, rows), trace.duration_ns[rows], strict=True):
            key = rank, name.split("@")[-1]
            count, total = totals.get(key, (0, 0))
            totals[key] = count + 1, total + int(duration)
    theirs = {}
    for recipe, query in (
        ("cann_api_sum", "SELECT rank, name, totalCount, totalTimeNs FROM CannApiSumRank"),
        ("hccl_sum", "SELECT Rank, OpType, Count, SumNs FROM HcclPerRankStats"),
    ):
        out = tmp_path / recipe
        program = Path(MSPROF_PYTHON).with_name("msprof-analyze")
        command = [
            str(program),
            "cluster",
            "-m",
            recipe,
            "-d",
            str(tmp_path / "runs"),
            "-o",
            str(out),
        ]
        subprocess.run([*command, "--export_type", "db"], check=True, timeout=300,
                       capture_output=True)  # fmt: skip
        (database,) = out.rglob("cluster_analysis.db")
        with closing(sqlite3.connect(database)) as connection:
            for rank, name, count, total in connection.execute(query):
                theirs[rank, name] = count, int(total)
    # Their collectives are named by type, ours by operation.
    ours = {
        (rank, "hcom_allReduce_" if name.startswith("hcom") else name): value
        for (rank, name), value in totals.items()
    }
    assert len(theirs) == 6
    assert ours == theirs


def executed(*statements: str) -> Callable[[Path], None]:
    """Return a function that changes a database."""

    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    return change


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
HOSTILE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "only the magic": lambda path: os.truncate(path, 16),
    "another program's": executed("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
                                  "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
                                  "DROP TABLE NVTX_EVENTS"),
    "endless views": executed(
        "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
        "DROP TABLE NVTX_EVENTS", f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {ENDLESS}",
        f"CREATE VIEW NVTX_EVENTS AS {ENDLESS}"),
    "no rows": executed("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "DELETE FROM NVTX_EVENTS",
                        "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME",
                        "DELETE FROM CUPTI_ACTIVITY_KIND_MEMCPY"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_databases_give_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Exit code 2, and no page."""
    path = write_nsys(tmp_path / "report.sqlite", simulate("cuda"))
    HOSTILE[case](path)
    assert main(["report", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["report.sqlite"]


def test_impossible_values_are_skipped_and_counted(tmp_path: Path) -> None:
    """Texts, negative lengths and numbers out of range; an endless view is not read."""
    path = write_nsys(tmp_path / "report.sqlite", simulate("cuda"))
    executed(
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = start - 5 WHERE rowid = 1",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE rowid = 2",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9e99 WHERE rowid = 3",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = x'00ff' WHERE rowid = 1",
        "UPDATE NVTX_EVENTS SET text = NULL WHERE rowid = 2",
        "DROP TABLE TARGET_INFO_GPU", f"CREATE VIEW TARGET_INFO_GPU AS {ENDLESS}",
    )(path)  # fmt: skip
    trace = read_trace(path)
    assert len(trace) == len(simulate("cuda")) - 5
    assert "4 damaged events were skipped" in trace.warnings[0]


def test_random_damage_never_gives_another_error(tmp_path: Path) -> None:
    """Bytes are changed anywhere after the header."""
    numbers = random.Random(0)
    good = write_ascend_db(tmp_path / "a.db", simulate("npu", steps=1)).read_bytes()
    path = tmp_path / "ascend_pytorch_profiler_0.db"
    errors = []
    for _ in range(60):
        content = bytearray(good)
        for _ in range(40):
            content[numbers.randrange(100, len(content))] = numbers.randrange(256)
        path.write_bytes(content)
        try:
            read_trace(path)
        except TraceError as error:
            errors.append(str(error))
    assert errors
    assert all(len(error.splitlines()) == 1 for error in errors)
