"""The report is a single offline page that a browser renders, and the Perfetto export is valid."""

import base64
import json
import re
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from browser import Tab, needs_browser
from hypothesis import given
from hypothesis import strategies as st
from simulation import Fault, simulate_run

from ms_profile.analysis.whole_run import analyse, analyse_traces
from ms_profile.cli import main
from ms_profile.errors import FormatError
from ms_profile.report import build_summary, write_report
from ms_profile.report.payload import Column, pack_columns
from ms_profile.report.perfetto import export_perfetto
from ms_profile.report.timeline import build_timeline
from ms_profile.trace.reader import read_trace

PARTS = (
    "overview", "timeline", "operators", "communication", "waiting", "data", "idle", "memory",
    "advice",
)  # fmt: skip


def unpack_columns(table: tuple[Column, ...], text: str) -> dict[str, np.ndarray]:
    """Invert `pack_columns`, like the page's `data.js`."""
    raw = zlib.decompress(base64.b64decode(text), -zlib.MAX_WBITS)
    columns = {}
    for column in table:
        width = int(column.type[1])
        planes = np.frombuffer(raw, np.uint8, width * column.length, column.offset)
        shuffled = np.ascontiguousarray(planes.reshape(width, -1).T)
        columns[column.name] = shuffled.reshape(-1).view(f"<u{width}")
    return columns


@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=50),
    st.lists(st.integers(0, 255), max_size=50),
    st.lists(st.integers(0, 65535), max_size=50),
)
def test_columns_round_trip(a: list[int], b: list[int], c: list[int]) -> None:
    """For columns of any width and length."""
    columns = {name: np.array(values, np.int64) for name, values in (("a", a), ("b", b), ("c", c))}
    table, text = pack_columns(columns)
    unpacked = unpack_columns(table, text)
    assert {name: values.tolist() for name, values in unpacked.items()} == {"a": a, "b": b, "c": c}


def test_the_returned_summary_is_the_one_on_the_page(tmp_path: Path) -> None:
    """Commands print the same summary that the page shows."""
    page = tmp_path / "report.html"
    summary = write_report(analyse_traces(simulate_run(ranks=2, steps=4).traces), page)
    embedded = re.search(r'id="summary">(.*?)</script>', page.read_text(), re.DOTALL)
    assert embedded is not None
    page_summary = json.loads(embedded[1])
    assert {"timeline", "columns"} <= page_summary.keys()
    page_only = {name: page_summary.pop(name) for name in ("timeline", "columns")}
    assert all(page_only.values())
    assert page_summary == json.loads(msgspec.json.encode(summary))


def test_numbers_that_do_not_fit_are_refused() -> None:
    """A negative number, or one above 32 bits, gives an error that names the column."""
    with pytest.raises(FormatError, match="column start"):
        pack_columns({"start": np.array([-1])})
    with pytest.raises(FormatError, match="column start"):
        pack_columns({"start": np.array([1 << 32])})


def test_the_timeline_keeps_every_span_in_place(traces_folder: Path) -> None:
    """Deltas sum back to every start, to within the unit, per track."""
    analysis = analyse(traces_folder / "ddp")
    timeline = build_timeline(analysis)
    starts = []
    for track in timeline.layout["tracks"]:
        rows = slice(track["first"], track["first"] + track["count"])
        starts += np.cumsum(timeline.columns["start"][rows]).tolist()
    origin, unit = int(timeline.layout["origin_ns"]), timeline.layout["unit_ns"]
    expected = sorted(
        int(start)
        for rank_analysis in analysis.ranks.values()
        for start in rank_analysis.trace.start_ns
    )
    assert len(starts) == len(expected)
    assert (
        max(
            abs(origin + delta * unit - start)
            for delta, start in zip(sorted(starts), expected, strict=True)
        )
        < unit
    )


def test_a_limited_timeline_keeps_the_longest_spans(
    traces_folder: Path,
) -> None:
    """With room for 100 spans the longest 100 are shown, together with the total."""
    analysis = analyse(traces_folder / "ddp")
    timeline = build_timeline(analysis, max_events=100)
    total = sum(len(rank_analysis.trace) for rank_analysis in analysis.ranks.values())
    assert (timeline.layout["shown"], timeline.layout["total"]) == (100, total)
    longest = sorted(
        int(d) for rank_analysis in analysis.ranks.values() for d in rank_analysis.trace.duration_ns
    )[-100:]
    unit = timeline.layout["unit_ns"]
    assert timeline.columns["duration"].min() * unit > longest[0] - unit


def test_the_page_loads_nothing(tmp_path: Path, traces_folder: Path) -> None:
    """The page references no other file or host, and forbids loading any."""
    write_report(analyse(traces_folder / "fsdp"), tmp_path / "report.html", title="a </script> b")
    text = (tmp_path / "report.html").read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|@import|url\(|https?://""", text)
    assert text.count("</script>") == 3


def test_unmeasured_values_are_null_and_not_zero(traces_folder: Path) -> None:
    """On a CPU without a recorder, copies, launches and garbage are None in the summary."""
    summary = build_summary(analyse(traces_folder / "ddp"))
    phases = summary["ranks"][0]["steps"][0]["phases"]
    assert [phases[name] for name in ("copy", "launch", "synchronize", "garbage")] == [None] * 4
    assert phases["compute"] > 0
    assert "NaN" not in json.dumps(summary)
    single_rank = build_summary(analyse(traces_folder / "ddp" / "rank-00000.json.gz"))
    assert single_rank["communication"]["waits"] is None
    assert single_rank["ledger"]["suspect"] is None
    assert single_rank["communication"]["seen"] > 0


@needs_browser
@pytest.mark.parametrize("part", PARTS)
def test_a_browser_draws_every_part(tmp_path: Path, part: str, tab: Tab) -> None:
    """With the run's figures, without NaN or undefined."""
    fault = Fault(phase="data", rank=1, delay_ns=20_000_000)
    page = tmp_path / "report.html"
    write_report(analyse_traces(simulate_run(ranks=4, fault=fault).traces), page, title="A run")
    document = tab.render(page, part)
    expected = {
        "overview": "rank 1</b>",
        "timeline": "<canvas",
        "operators": "aten::_foreach_add_",
        "communication": "Who waits for whom",
        "waiting": "Rank 1 in its data phase",
        "data": "nothing else running",
        "idle": "The longest gaps",
        "memory": "Not measurable",
        "advice": "stragglers",
    }
    assert 'data-ready="yes"' in document
    panels = document[document.index('<main id="panels">') : document.index("<footer>")]
    section = panels[panels.index(f'id="panel-{part}"') :].split("</section>")[0]
    assert expected[part].lower() in section.lower()
    assert "NaN" not in section
    assert "undefined" not in section
    assert "Infinity" not in section


@needs_browser
def test_keyboard_shortcuts_work(tmp_path: Path, tab: Tab) -> None:
    """Digits open parts; w zooms, d pans, 0 resets, n selects a match; t toggles the theme."""
    page = tmp_path / "report.html"
    write_report(analyse_traces(simulate_run(ranks=2).traces), page)
    script = """
    const press = (key, on = document) => on.dispatchEvent(
      new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    const said = [];
    for (let n = 1; n <= 9; n++) {
      press(String(n));
      said.push(document.querySelector("[role=tab][aria-selected=true]").textContent.split(" ")[0]);
    }
    press("2");
    const wait = () => {
      const line = window.timeline;
      if (!line) { setTimeout(wait, 10); return; }
      const width = () => (line.to - line.from) / line.length;
      press("w", line.canvas); press("w", line.canvas);
      said.push(width() < 0.6 ? "zoomed" : "not zoomed");
      const from = line.from;
      press("d", line.canvas);
      said.push(line.from > from ? "panned" : "not panned");
      press("0", line.canvas);
      said.push(Math.abs(width() - 1) < 0.05 ? "all" : "not all");
      said.push(line.search("all_reduce") + " found");
      press("n", line.canvas);
      said.push(line.describe(line.picked).split(" ")[0]);
      const before = document.documentElement.dataset.theme;
      press("t");
      said.push(document.documentElement.dataset.theme !== before ? "turned" : "not turned");
      document.title = said.join(" ");
    };
    wait();
    """
    text = page.read_text().replace("</body>", f"<script>{script}</script></body>")
    page.write_text(text)
    title = tab.title_from_script(page)
    parts = "Overview Timeline Operators Communication Waiting Data Idle Memory Advice"
    assert title == f"{parts} zoomed panned all 96 found gloo:all_reduce turned"


def test_the_perfetto_export_can_be_read_back(tmp_path: Path, traces_folder: Path) -> None:
    """With all spans of all ranks, one process per rank, with names and durations."""
    analysis = analyse(traces_folder / "fsdp")
    for name in ("all.json", "all.json.gz"):
        count = export_perfetto(analysis, tmp_path / name)
        exported = read_trace(tmp_path / name)
        assert (
            count
            == len(exported)
            == sum(len(rank_analysis.trace) for rank_analysis in analysis.ranks.values())
        )
        lengths = sorted(
            int(d)
            for rank_analysis in analysis.ranks.values()
            for d in rank_analysis.trace.duration_ns
        )
        assert sorted(exported.duration_ns.tolist()) == lengths
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "all.json.gz"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_perfetto_export_is_a_valid_json_trace(
    tmp_path: Path, traces_folder: Path, strategy: str
) -> None:
    """Only known phases, whole nanoseconds, named processes and threads, nested spans."""
    export_perfetto(analyse(traces_folder / strategy), tmp_path / "all.json")
    document = json.loads((tmp_path / "all.json").read_text())
    assert document.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    metadata = set()
    for event in document["traceEvents"]:
        thread_key = event["pid"], event.get("tid")
        if event["ph"] == "M":
            metadata.add((event["name"], *thread_key))
            continue
        start, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
        # Float64 represents timestamps of hours to a millionth of a µs.
        assert abs(start / 1e3 - event["ts"]) < 1e-6
        assert (event["ph"], type(event["name"])) == ("X", str)
        assert start >= 0 <= length
        threads.setdefault(thread_key, []).append((start, -length))
    assert {name for name, *_ in metadata} == {"process_name", "process_sort_index", "thread_name"}
    for thread_key, spans in threads.items():
        assert {("thread_name", *thread_key), ("process_name", thread_key[0], None)} <= metadata
        open_ends: list[int] = []
        for start, negative_length in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or start - negative_length <= open_ends[-1]
            open_ends.append(start - negative_length)


def test_the_commands_report_and_compare(
    tmp_path: Path, traces_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`report` writes its page and says so; bad input gives exit code 2 and one line."""
    page = tmp_path / "page.html"
    assert main(["report", str(traces_folder / "ddp"), "--out", str(page)]) == 0
    assert "2 ranks" in capsys.readouterr().out
    assert page.stat().st_size > 50_000
    assert main(["report", str(traces_folder / "ddp"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][1]["rank"] == 1
    assert main(["report", str(tmp_path / "nothing")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "does not exist" in error
    (tmp_path / "nothing").mkdir()
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "has no traces" in capsys.readouterr().err
    pair = [str(traces_folder / "ddp")] * 2
    assert main(["compare", *pair]) == 2
    assert "named steps per run, got 2" in capsys.readouterr().err


def test_compare_exits_1_on_a_regression_and_0_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slower second run exits with 1; the same or a faster one with 0."""
    slow = Fault(phase="compute", rank=0, delay_ns=20_000_000)
    for name, fault in (("a", None), ("b", slow)):
        (tmp_path / name).mkdir()
        for rank, trace in simulate_run(ranks=2, fault=fault, seed=3).traces.items():
            events = [
                {"ph": "X", "name": trace.name_of(row), "pid": 1, "tid": int(trace.thread[row]),
                 "cat": "cpu_op" if trace.category[row] == 1 else "user_annotation",
                 "ts": float(trace.start_ns[row] % 10**15) / 1e3,
                 "dur": float(trace.duration_ns[row]) / 1e3}
                for row in range(len(trace))
            ]  # fmt: skip
            (tmp_path / name / f"rank-{rank}.json").write_text(json.dumps({"traceEvents": events}))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["compare", a, b]) == 1
    assert "significant regression" in capsys.readouterr().out
    assert main(["compare", b, a]) == 0
    assert main(["compare", a, a]) == 0
    assert main(["compare", a, b, "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["regression"] is True
