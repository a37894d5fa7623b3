"""Metrics decide which data is recorded and shown; the page describes the run and shows causes."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Tab, needs_browser
from fuzz_profile import cases
from simulation import Fault, simulate_run

from ms_profile.advice import advise
from ms_profile.analysis.whole_run import analyse, analyse_traces
from ms_profile.cli import main
from ms_profile.log.ring import Kind
from ms_profile.metrics import METRICS, Collect, collected_for
from ms_profile.recording.recorder import Recorder
from ms_profile.report import build_summary, write_report
from ms_profile.report.timeline import GARBAGE, build_timeline
from ms_profile.trace.columns import Trace

MS = 1_000_000


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The output folder of a two-rank run that recorded communication and memory."""
    (case,) = (case for case in cases() if case.name == "run-manifest")
    case.make(tmp_path)
    return tmp_path


def report_json(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Return the JSON of `ms-profile report --json`."""
    assert main(["report", str(folder), "--json", *options]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_gives_a_different_report(
    run_folder: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    """Only the metric's own parts are shown, and no two metrics show the same."""
    shown = {name: report_json(run_folder, capsys, "--metrics", name)["shown"] for name in METRICS}
    assert shown[metric] == sorted(METRICS[metric].shows)
    assert [name for name, parts in shown.items() if parts == shown[metric]] == [metric]


def test_parts_shown_by_each_metric(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every metric shows at least one part."""
    expected = {
        "communication_time": ["communication", "waiting"],
        "compute_time": ["operators"],
        "memory": ["memory"],
        "operators": ["operators", "shapes"],
        "data_time": ["data"],
        "idle": ["idle"],
    }
    shown = {name: report_json(run_folder, capsys, "--metrics", name)["shown"] for name in METRICS}
    assert shown == expected


@pytest.mark.parametrize(
    ("metric", "collect"),
    [
        ("communication_time", Collect.SHAPES | Collect.GROUPS),
        ("compute_time", Collect.NOTHING),
        ("memory", Collect.MEMORY),
        ("operators", Collect.SHAPES),
        ("data_time", Collect.DATA_WAITS),
        ("idle", Collect.NOTHING),
    ],
)
def test_each_metric_selects_its_recorded_data(metric: str, collect: Collect) -> None:
    """Several metrics record the union of their data."""
    assert collected_for([metric]) == collect
    assert collected_for([metric, "memory"]) == collect | Collect.MEMORY


def test_a_report_shows_the_metrics_of_the_run(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They come from the manifest unless `--metrics` overrides them; unknown ones are refused."""
    assert report_json(run_folder, capsys)["shown"] == ["communication", "memory", "waiting"]
    assert report_json(run_folder, capsys, "--metrics", "idle")["shown"] == ["idle"]
    assert main(["report", str(run_folder), "--metrics", "idel"]) == 2
    assert "did you mean 'idle'?" in capsys.readouterr().err


def test_idle_time_is_unfilled_time_and_its_causes_sum_to_it() -> None:
    """Step time minus compute, communication and copies; every gap has one cause."""
    run = analyse_traces(simulate_run(ranks=2).traces)
    for rank, wall, idle, causes in build_summary(run)["idle"]["ranks"]:
        phases = [step.phases_ns for step in run.ranks[rank].breakdowns]
        busy = sum(phase[name] for phase in phases for name in ("compute", "collective", "copy"))
        assert idle == wall - busy
        assert idle == sum(amount for amount in causes.values() if amount is not None)


def test_waits_for_data_are_listed_longest_first() -> None:
    """The rank with a slow loader comes first, with the length of its delay."""
    fault = Fault(phase="data", rank=1, delay_ns=20 * MS)
    data = build_summary(analyse_traces(simulate_run(ranks=2, fault=fault).traces))["data"]
    exposed_waits = {rank: exposed for rank, _, exposed in data["ranks"]}
    assert exposed_waits[1] > 10 * exposed_waits[0]
    assert data["longest"][0][0] == 1
    assert data["longest"][0][2] == pytest.approx(20 * MS, rel=0.5)


def intervals(*pairs: tuple[int, int]) -> np.ndarray:
    """Return an array of intervals in ns."""
    return np.array(pairs, np.int64)


def slow_host(rank: int) -> Fault:
    """A fault: one rank has 20 ms of unrecorded time in every step."""
    return Fault(phase="host", rank=rank, delay_ns=20 * MS)


def idle_intervals(traces: dict[int, Trace], rank: int) -> list[tuple[int, int]]:
    """Return 10 ms of every step in which that rank's trace is empty."""
    steps = analyse_traces(traces).ranks[rank].activity.steps
    return [(step.start_ns + 5 * MS, step.start_ns + 15 * MS) for step in steps]


def test_garbage_collections_in_only_the_first_step_give_no_advice() -> None:
    """Starting the tracer causes them; recurring collections count."""
    traces = simulate_run(ranks=1, steps=4, fault=slow_host(0)).traces
    idle = idle_intervals(traces, 0)
    start, end = idle[0]
    two_in_first_step = [(start, start + 4 * MS), (end - 4 * MS, end)]
    for gaps, expected in (
        (idle[:1], False),
        (two_in_first_step, False),
        (idle[1:2], False),  # a single one is not a pattern
        (idle, True),
    ):
        findings = advise(analyse_traces(traces, garbage={0: intervals(*gaps)}))
        assert ("garbage_collection" in {finding.rule for finding in findings}) == expected, gaps


def test_garbage_collections_in_advice_are_timeline_spans() -> None:
    """Clicking the evidence opens the span, although the tracer did not record it."""
    traces = simulate_run(ranks=2, steps=4, fault=slow_host(1)).traces
    run = analyse_traces(traces, garbage={1: intervals(*idle_intervals(traces, 1))})
    (finding,) = (item for item in advise(run) if item.rule == "garbage_collection")
    timeline = build_timeline(run)
    (track,) = (item for item in timeline.layout["tracks"] if item["name"] == "garbage collection")
    rows = slice(track["first"], track["first"] + track["count"])
    assert set(timeline.columns["category"][rows].tolist()) == {GARBAGE}
    unit, origin = timeline.layout["unit_ns"], int(timeline.layout["origins"]["1"])
    starts = np.cumsum(timeline.columns["start"][rows]) * unit + origin
    drawn_spans = sorted(
        zip(starts.tolist(), timeline.columns["duration"][rows] * unit, strict=True)
    )
    assert track["rank"] == 1
    for evidence in finding.evidence:
        assert any(
            abs(start - evidence.start_ns) <= unit and abs(duration - evidence.duration_ns) <= unit
            for start, duration in drawn_spans
        )


def test_uniformly_slow_transfers_name_no_ranks() -> None:
    """With two ranks "ranks 0, 1" is meaningless; with faster others the two are named."""
    for ranks, every_nth, all_slow in ((2, 2, True), (4, 1, False)):
        fault = Fault(phase="link", rank=0, delay_ns=30 * MS, every=every_nth)
        run = simulate_run(ranks=ranks, fault=fault, grid=2 if ranks > 2 else 0)
        slow = build_summary(analyse_traces(run.traces))["communication"]["slow_group"]
        assert slow["ranks"] == (0, 1)
        assert slow["everyone"] == all_slow


@needs_browser
def test_the_page_names_no_rank_if_all_transfers_are_slow(tmp_path: Path, tab: Tab) -> None:
    """It says how to tell the links apart."""
    page = tmp_path / "page.html"
    fault = Fault(phase="link", rank=0, delay_ns=30 * MS, every=2)
    write_report(analyse_traces(simulate_run(ranks=2, fault=fault).traces), page)
    document = tab.render(page, "communication").split("<body")[1].split("<script")[0]
    assert "Uneven transfers" in document
    assert "those of rank" not in document


def test_ranks_without_a_common_clock_start_at_zero(
    traces_folder: Path,
) -> None:
    """Clocks that are years apart neither break the page nor reduce its resolution."""
    trace = analyse(traces_folder / "ddp").ranks[0].trace
    from attrs import evolve

    shifted = evolve(trace, rank=1, start_ns=trace.start_ns - trace.start_ns.min(), messages={},
                 category=np.where(trace.category == 6, 2, trace.category))  # fmt: skip
    run = analyse_traces({0: trace, 1: shifted})
    assert run.ranks[1].clock is None
    layout = build_timeline(run).layout
    assert layout["unit_ns"] == 10
    assert layout["origins"]["1"] == "0"


@needs_browser
def test_the_page_describes_the_run_and_its_window(tmp_path: Path, tab: Tab) -> None:
    """Name, command, date and steps of the window."""
    (case,) = (case for case in cases() if case.name == "run-manifest")
    folder = tmp_path / "my-run"
    folder.mkdir()
    case.make(folder)
    manifest = folder / "ranks/rank-00000.json"
    rank_manifest = json.loads(manifest.read_text())
    rank_manifest["traces"] = rank_manifest["traces"] * 2
    manifest.write_text(json.dumps(rank_manifest))
    page = tmp_path / "page.html"
    write_report(analyse(folder), page)
    document = tab.render(page)
    header = re.sub(r"<[^>]+>", " ", document.split("<header>")[1].split("</header>")[0])
    header = " ".join(header.split())
    assert header.startswith("my-run")
    assert "command train.py" in header
    assert "started 2025-10-09 08:53:20 UTC" in header
    assert "window 2 of 2 only, the last: steps 0 to 5 of 6" in header
    assert "Data</button>" not in document  # data_time was not recorded


@needs_browser
def test_empty_columns_are_named_instead_of_drawn(
    tmp_path: Path, traces_folder: Path, tab: Tab
) -> None:
    """A CPU has no copies, launches or device waits; garbage collections need a recorder."""
    page = tmp_path / "page.html"
    write_report(analyse(traces_folder / "ddp"), page)
    document = tab.render(page)
    steps = document[document.index('<table aria-label="Steps by rank"') :]
    headers = re.findall(r"<th[^>]*><button[^>]*>([^<]*)<", steps.split("</thead>")[0])
    assert headers == ["rank", "step", "wall", "compute", "collective", "data", "host", "hidden"]
    assert "Not measurable here: copy, garbage, synchronize, launch." in steps


@needs_browser
def test_the_table_of_operators_shows_its_times_on_a_narrow_screen(
    tmp_path: Path, tab: Tab
) -> None:
    """At 420 pixels the columns operator, self, self share and total are visible."""
    page = tmp_path / "page.html"
    write_report(analyse_traces(simulate_run(ranks=2).traces), page)
    script = """
    const heads = [...document.querySelectorAll('#panel-operators th')].slice(0, 4);
    document.title = heads.map((head) => head.textContent + ':' +
      (head.getBoundingClientRect().right <= 420 ? 'in' : 'out')).join(' ');
    """
    frame = tmp_path / "frame.html"
    text = page.read_text().replace("</body>", f"<script>{script}</script></body>")
    frame.write_text(text.replace("<body>", '<body style="width: 420px">'))
    narrow = frame.read_text().replace("max-width: 640px", "min-width: 1px")
    frame.write_text(narrow)
    title = tab.title_from_script(frame, "operators")
    assert title == "operator:in self:in self share:in total:in"


@needs_browser
def test_every_span_of_two_pixels_is_drawn_at_every_zoom(
    tmp_path: Path, make_trace: Callable[..., Trace], tab: Tab
) -> None:
    """Including a wide span that starts in the pixel of a narrow one."""
    spans = []
    for step in range(300):
        start = 1000.0 * step
        spans += [("cpu_op", f"narrow{n}", "main", start + n / 100, 0.01) for n in range(90)]
        loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        spans += [("user_annotation", loader, "main", start + 1, 400.0)]
        spans += [("cpu_op", "aten::mm", "main", start + 401 + n, 0.9) for n in range(10)]
    page = tmp_path / "page.html"
    write_report(analyse_traces({0: make_trace(spans)}), page)
    script = """
    document.querySelector('#tab-timeline').click();
    const wait = () => {
      const line = window.timeline;
      if (!line || !line.width) { setTimeout(wait, 10); return; }
      const { begin, duration } = line.columns;
      const left0 = line.x(line.from);
      let wide = 0, missing = 0, zooms = 0;
      for (let zoom = 1; zoom < 3000; zoom *= 1.7) {
        zooms++;
        line.from = line.length * 0.31; line.to = line.from + line.length * 0.6 / zoom;
        const drawn = new Map();
        const fillRect = line.pen.fillRect;
        line.pen.fillRect = (x, y, width, tall) => {
          if (!drawn.has(y)) drawn.set(y, new Map());
          drawn.get(y).set(Math.round(10 * x), width);
        };
        line.paint();
        line.pen.fillRect = fillRect;
        const scale = (line.width - left0) / (line.to - line.from);
        for (const lane of line.lanes) {
          const rects = drawn.get(26 + lane.y - line.scroll) || new Map();
          for (const row of lane.rows) {
            const left = left0 + (begin[row] - line.from) * scale, long = duration[row] * scale;
            if (long < 2 || left < left0 || left + long > line.width) continue;
            wide++;
            const width = rects.get(Math.round(10 * left));
            if (width === undefined || Math.abs(width - long) > 1) missing++;
          }
        }
      }
      document.title = `${zooms} zooms, ${wide > 100 ? "many" : wide} wide, ${missing} missing`;
    };
    window.addEventListener("error", (event) => { document.title = event.message; });
    wait();
    """
    page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    title = tab.title_from_script(page)
    assert title == "16 zooms, many wide, 0 missing"


@needs_browser
def test_going_to_an_interval_marks_it_or_selects_its_span(tmp_path: Path, tab: Tab) -> None:
    """A gap becomes a marked interval with its length; a span's exact interval selects the span."""
    run = analyse_traces(simulate_run(ranks=2, steps=3).traces)
    page = tmp_path / "page.html"
    write_report(run, page)
    idle = build_summary(run)["idle"]["longest"][0]
    trace = run.ranks[0].trace
    longest = int(trace.duration_ns.argmax())
    script = f"""
    document.querySelector('#tab-timeline').click();
    const wait = () => {{
      const line = window.timeline;
      if (!line) {{ setTimeout(wait, 10); return; }}
      line.goTo({idle[0]}, "{idle[1]}", {idle[2]});
      const marked = document.getElementById("picked").textContent;
      line.goTo(0, "{int(trace.start_ns[longest])}", {int(trace.duration_ns[longest])});
      document.title = (marked.includes("marked interval") && line.marked ? "marked" : marked) +
        " " + (line.picked >= 0 ? line.describe(line.picked).split(" ")[0] : "nothing");
    }};
    wait();
    """
    page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    title = tab.title_from_script(page)
    assert title == f"marked {trace.name_of(longest).split(' ')[0]}"


def test_a_recorder_ring_can_be_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps, modules and waits, and the module in which the process ended."""
    path = tmp_path / "rank-3.ring"
    with Recorder(path, rank=3) as recorder:
        for step in range(5):
            recorder.ring.step = step
            with recorder.span("step", Kind.STEP):
                list(recorder.batches(range(1)))
                with recorder.span("Net", Kind.FORWARD), recorder.span("layers.0", Kind.MODULE):
                    pass
        recorder.ring.begin(recorder.ring.name("layers.1"), Kind.MODULE)
    facts = report_json(path, capsys)
    (rank,) = facts["ranks"]
    assert (rank["rank"], [step["number"] for step in rank["steps"]]) == (3, [1, 2, 3, 4])
    assert {"Net", "layers.0"} <= {row[0] for row in facts["operators"]["rows"]}
    assert facts["data"]["ranks"][0][1] > 0
    assert "the process was in step 4, inside layers.1" in " ".join(facts["warnings"])
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "1 rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "command"),
    [("profile", "run"), ("reprot", "report"), ("view", "report"), ("diff", "compare"),
     ("log", "logs"), ("links", "link")],
)  # fmt: skip
def test_an_unknown_command_suggests_the_nearest(
    capsys: pytest.CaptureFixture[str], word: str, command: str
) -> None:
    """For typos and for names used by other tools."""
    assert main([word, "--train-script", "train.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"unknown command {word!r}; did you mean {command!r}?" in line


def test_version_prints_name_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the name and the version."""
    with pytest.raises(SystemExit) as ending:
        main(["--version"])
    assert ending.value.code == 0
    assert re.fullmatch(r"ms-profile \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]])
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    """They must answer immediately."""
    code = (
        "import sys; from ms_profile.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "x", "--window", "0"], "--window must be at least 1, got 0"),
        (["report", "x", "--max-events", "0"], "--max-events must be at least 1, got 0"),
        (["logs", "x", "--since", "nan"], "--since must be 0 to 10000000000 seconds, got nan"),
        (
            ["compare", "a", "b", "--max-wait", "nan"],
            "--max-wait must be at least 0, got nan",
        ),
        (["report", "x", "--max-events", "many"], "invalid int value"),
    ],
)
def test_invalid_numbers_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """With the option, the value, and exit code 2."""
    try:
        code: object = main(arguments)
    except SystemExit as ending:
        code = ending.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


STEP_SCOPE = "ProfilerStep#3"
DEGENERATE: dict[str, list[tuple[str, str, str, float, float]]] = {
    "one step": [
        ("user_annotation", STEP_SCOPE, "main", 0.0, 1000.0),
        ("cpu_op", "aten::mm", "main", 100.0, 500.0),
    ],
    "one span": [("cpu_op", "aten::mm", "main", 5.0, 1.0)],
    "zero duration": [
        ("user_annotation", STEP_SCOPE, "main", 7.0, 0.0),
        ("cpu_op", "aten::mm", "main", 7.0, 0.0),
    ],
    "one instant on a device": [
        ("cpu_op", "aten::mm", "main", 7.0, 0.0),
        ("kernel", "gemm", "stream 7", 7.0, 0.0),
        ("kernel", "ncclDevKernel", "stream 7", 7.0, 0.0),
    ],
    "nested spans": [("cpu_op", f"f{n}", "main", float(n), 1000.0 - 2 * n) for n in range(100)],
}


@needs_browser
@pytest.mark.parametrize("name", DEGENERATE)
def test_a_nearly_empty_run_is_drawn_without_nan(
    name: str, tmp_path: Path, make_trace: Callable[..., Trace], tab: Tab
) -> None:
    """No part shows NaN, and no canvas call gets a non-finite number at any zoom."""
    page = tmp_path / "page.html"
    traces = {rank: make_trace(DEGENERATE[name], rank=rank) for rank in range(2)}
    write_report(analyse_traces(traces), page)
    script = """
    const wrong = new Set(), pen = CanvasRenderingContext2D.prototype;
    for (const name of ["fillRect", "strokeRect", "moveTo", "lineTo", "fillText"]) {
      const own = pen[name];
      pen[name] = function (...given) {
        if (!given.slice(name === "fillText" ? 1 : 0).every(Number.isFinite)) wrong.add(name);
        return own.apply(this, given);
      };
    }
    window.addEventListener("error", (event) => { wrong.add(event.message); });
    const tabs = [...document.querySelectorAll("[id^=tab-]")];
    const look = () => {
      for (const tab of tabs) {
        tab.click();
        const text = document.getElementById("panels").innerHTML;
        for (const word of ["NaN", "undefined", "Infinity"]) if (text.includes(word)) wrong.add(`${tab.id} ${word}`);
      }
      document.querySelector("#tab-timeline").click();
      setTimeout(zoom, 50);
    };
    const zoom = () => {
      const line = window.timeline;
      if (!line || !line.width) { setTimeout(zoom, 10); return; }
      for (const factor of [1, 0.5, 0.01, 0.001, 100, 1e6]) { line.zoom(factor, line.width / 2); line.paint(); }
      const rows = line.lanes.reduce((sum, lane) => sum + lane.rows.length, 0);
      let overlaps = 0;
      for (const lane of line.lanes) for (let i = 1; i < lane.rows.length; i++) {
        const { begin, duration } = line.columns, before = lane.rows[i - 1];
        if (begin[lane.rows[i]] < begin[before] + duration[before]) overlaps++;
      }
      document.title = `${tabs.length} parts, ${rows} spans, ${overlaps} overlap, wrong: ${[...wrong].join(" ")}`;
    };
    const wait = () => (document.documentElement.dataset.ready || document.body.dataset.ready ? look() : setTimeout(wait, 10));
    wait();
    """  # noqa: E501
    page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    title = tab.title_from_script(page)
    spans = 2 * len(DEGENERATE[name])
    assert title == f"9 parts, {spans} spans, 0 overlap, wrong:"
