"""Foreign or damaged files lose at most the damaged part, and give one line quickly."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_profile import cases

from ms_profile.cli import main
from ms_profile.log import blocks
from ms_profile.log.blocks import HEADER, MAGIC, Block, Damage, pack_block, scan_blocks
from ms_profile.log.event_log import EventLog
from ms_profile.log.ring import Kind, Ring, read_ring
from ms_profile.trace.reader import read_trace

Writer = Callable[[list[dict[str, Any]]], str]
DEEP = "[" * 100_000 + "]" * 100_000


def spans(count: int = 20) -> list[dict[str, Any]]:
    """Return steps and operators in the profiler's format."""
    return [
        {"ph": "X", "cat": "user_annotation" if n % 4 == 0 else "cpu_op", "pid": 1, "tid": 1,
         "name": f"ProfilerStep#{n // 4}" if n % 4 == 0 else "aten::mm", "ts": 100.0 * n,
         "dur": 390.0 if n % 4 == 0 else 90.0, "args": {"External id": n}}
        for n in range(count)
    ]  # fmt: skip


def with_raw_value(event: dict[str, Any], key: str, text: str) -> str:
    """Return the event as JSON with one value replaced by text that no encoder would write."""
    placeholder = event | {key: "REPLACED"}
    return json.dumps(placeholder).replace('"REPLACED"', text)


BAD_VALUES = {
    "a time beyond int64": ("ts", "9.3e15"),
    "a time beyond float64": ("ts", "1e999"),
    "a time that is not a number": ("ts", '"soon"'),
    "a time of another year": ("ts", "1.7e15"),
    "a time of 400 digits": ("ts", "9" * 400),
    "a negative duration": ("dur", "-5.0"),
    "a duration of a year": ("dur", "3.2e13"),
    "a duration that is a negative text": ("dur", '"-1.5"'),
    "a name that is not a text": ("name", "[1]"),
    "deep nesting": ("args", DEEP),
    "an id beyond int64": ("args", '{"External id": 1180591620717411303424}'),
    "bytes beyond int64": ("args", '{"bytes": -1180591620717411303424}'),
}


@pytest.mark.parametrize("case", BAD_VALUES)
@pytest.mark.parametrize("layout", ["kineto", "compact"])
def test_one_bad_event_is_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, layout: str
) -> None:
    """The report is written; stderr and the page say that the event was skipped."""
    key, text = BAD_VALUES[case]
    parts = [json.dumps(event) for event in spans()]
    parts[5] = with_raw_value(spans()[5], key, text)
    separator = ",\n  " if layout == "kineto" else ", "
    body = separator.join(part if layout == "compact" else part[:-1] + "\n  }" for part in parts)
    body = body.replace("\n  },\n  {", "\n  },\n  {")
    path = tmp_path / "rank-0.json"
    path.write_text(f'{{"traceEvents": [\n  {body}\n  ]}}')
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--out", str(page)]) == 0
    error = capsys.readouterr().err
    assert "rank-0.json: 1 damaged event was skipped" in error
    assert len(error.splitlines()) == 1
    assert "1 damaged event was skipped" in page.read_text()
    trace = read_trace(path)
    assert set(trace.external.tolist()) == set(range(20)) - {5}


def test_timestamps_may_be_strings_or_numbers(tmp_path: Path) -> None:
    """Both in one file, exact to the nanosecond."""
    events = spans(8)
    events[3] = events[3] | {"ts": "300.125", "dur": "90.001"}
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(events))
    trace = read_trace(path)
    row = int(np.flatnonzero(trace.external == 3)[0])
    assert (int(trace.start_ns[row]), int(trace.duration_ns[row])) == (300_125, 90_001)


def test_names_may_contain_template_placeholders(tmp_path: Path) -> None:
    """An operator and a title named {{scripts}} are shown unchanged."""
    events = spans()
    events[2]["name"] = "{{scripts}}"
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(events))
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--out", str(page), "--title", "{{summary}} {{style}}"]) == 0
    text = page.read_text()
    assert "<title>{{summary}} {{style}} · ms-profile</title>" in text
    assert '"{{scripts}}"' in text
    assert text.count("function sortedTable") == 1


def test_two_traces_of_one_rank_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The later one is read; a Perfetto export is not a rank; both are reported."""
    for number, shift in ((0, 0.0), (1, 1e6)):
        events = [event | {"ts": event["ts"] + shift} for event in spans()]
        document = {"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events}
        (tmp_path / f"window-{number}.json").write_text(json.dumps(document))
    first_window = str(tmp_path / "window-0.json")
    export = str(tmp_path / "all.json")
    assert (
        main(["report", first_window, "--perfetto", export, "--out", str(tmp_path / "a.html")]) == 0
    )
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in facts["ranks"]] == [0]
    warnings = " ".join(facts["warnings"])
    assert "window-0.json and window-1.json are both from rank 0" in warnings
    assert "all.json is an export for Perfetto with all ranks" in warnings
    assert main(["report", export]) == 2
    assert "pass the traces that it was made from" in capsys.readouterr().err


ESCAPES = "\x1b[2J\x1b]0;owned\x07 a\nb \u202e"


def test_control_sequences_from_files_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In kinds, fields and names, with one output line each."""
    with EventLog(tmp_path / "events", rank=0) as log:
        log(f"kind{ESCAPES}", {f"field{ESCAPES}": f"value{ESCAPES}", "step": 1})
    assert main(["logs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert "\\x1b[2J" in out
    for name in ("a", "b"):
        events = spans(40)
        events[6]["name"] = f"[red]aten::{ESCAPES}"
        (tmp_path / f"{name}.json").write_text(json.dumps({"traceEvents": events}))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert main(["report", str(tmp_path / "a.json")]) == 0
    captured = capsys.readouterr()
    assert "[red]aten" in captured.out
    assert not {"\x1b", "\x07", "\u202e"} & set(captured.out + captured.err + out)


def test_fake_headers_do_not_cause_quadratic_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mebibyte of headers that each claim the rest of the file.

    Bytes read for checksums are counted: at most a few times the file.
    """
    size = 1 << 20
    headers = b"".join(
        HEADER.pack(MAGIC, max(size - position - HEADER.size, 0), 1 << 20, 0, 7)
        for position in range(0, size, HEADER.size)
    )
    checksummed_bytes, crc32 = 0, zlib.crc32

    def counting_crc32(content: bytes, start: int = 0) -> int:
        nonlocal checksummed_bytes
        checksummed_bytes += len(content)
        return crc32(content, start)

    monkeypatch.setattr(blocks.zlib, "crc32", counting_crc32)
    items = list(scan_blocks(headers))
    assert checksummed_bytes <= blocks.FREE_BYTES + blocks.SEARCH_FACTOR * size + size
    assert [type(item) for item in items] == [Damage]


def test_a_valid_block_after_fake_headers_is_found() -> None:
    """Lengths claimed by a damaged part do not hide the blocks after it."""
    fake = b"".join(HEADER.pack(MAGIC, 400 * HEADER.size, 1 << 20, 0, n) for n in range(400))
    items = list(scan_blocks(fake + pack_block(b"whole", 0) + bytes(100)))
    assert [item.content for item in items if isinstance(item, Block)] == [b"whole"]


def test_malformed_events_lose_only_their_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deep nesting, invalid UTF-8 and extreme years are reported; valid events are printed."""
    with EventLog(tmp_path / "events", rank=0) as log:
        log("step", {"step": 1})
    array = b"\xdd" + struct.pack(">I", 1)
    event = b"\x96\x00\xa4step\x01\x00\xcf" + b"\xff" * 8 + b"\x81\xa4step\x01"
    with log.path.open("ab") as file:
        file.write(pack_block(array + b"\x91" * 100_000, 2))
        file.write(pack_block(array + b"\x96\x00\xa2\xff\xfe\x01\x00\x00\x80", 3))
        file.write(pack_block(array + event, 4))
    assert main(["logs", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert captured.out.splitlines()[1].startswith("2554-07-21T")
    assert [line.split(" up to")[0] for line in captured.err.splitlines()] == [
        "ms-profile: rank-00000.000000.events has a block without events,"
    ] * 2
    assert main(["logs", str(tmp_path), "--tensorboard", str(tmp_path / "tb")]) == 1


def test_impossible_spans_of_a_ring_are_skipped(tmp_path: Path) -> None:
    """Impossible times and unknown kinds do not reach the report."""
    path = tmp_path / "one.ring"
    ring = Ring(path, capacity=8)
    for _ in range(4):
        ring.end(ring.begin(ring.name("sound"), Kind.FORWARD))
    ring.close()
    content = bytearray(path.read_bytes())
    slots = len(content) - 8 * 32
    struct.pack_into("<QQ", content, slots, 1 << 63, 5)
    content[slots + 32 + 22] = 250  # an unknown kind
    path.write_bytes(content)
    assert len(read_ring(path).spans) == 3
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    struct.pack_into("<q", content, 40, -5)
    path.write_bytes(content)
    assert main(["report", str(path)]) == 2


@pytest.mark.parametrize("command", ["report", "logs", "compare", "run", "links"])
@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "x/" * 3000, "circle/a", "\udcff"])
def test_an_unusable_path_gives_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    path: str,
) -> None:
    """A NUL, a name that is too long, circular links and invalid bytes."""
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    Path("script.py").write_text("")
    arguments = {
        "report": ["report", path],
        "logs": ["logs", path],
        "compare": ["compare", path, path],
        "run": ["run", "--train-script", "script.py", "--output-dir", path, "--active", "0"],
        "links": ["report", "nowhere", "--links", path],
    }[command]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 600


@pytest.mark.parametrize("trace_path", ["../outside.json", "{outside}", "a\0b", "x" * 5000])
def test_a_manifest_cannot_name_files_outside_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace_path: str
) -> None:
    """Such paths in a damaged or foreign manifest are not read."""
    folder, outside = tmp_path / "run", tmp_path / "outside.json"
    outside.write_text(json.dumps({"traceEvents": spans()}))
    (case,) = (case for case in cases() if case.name == "run-rank")
    folder.mkdir()
    case.make(folder)
    for path in (folder / "ranks").iterdir():
        rank_manifest = json.loads(path.read_text())
        rank_manifest["traces"][0]["path"] = trace_path.format(outside=outside)
        path.write_text(json.dumps(rank_manifest))
    for path in (folder / "traces").iterdir():
        path.unlink()
    assert main(["report", str(folder)]) == 2
    assert "saved no window of traced steps" in capsys.readouterr().err


MANIFESTS = {
    "deep nesting": DEEP,
    "no UTF-8": b'{"format": "ms-profile.run.1", "script": "\xff"}',
    "a year that no calendar has": '{"format": "ms-profile.run.1", "world_size": 1, "metrics": [],'
    ' "script": "a", "started_wall_ns": 99999999999999999999, "window": {}, "versions": {}}',
    "nothing": "",
}


@pytest.mark.parametrize("content", MANIFESTS.values(), ids=MANIFESTS)
def test_a_damaged_manifest_does_not_lose_the_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes
) -> None:
    """The report uses the traces in the folder and names both manifests."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "ranks").mkdir()
    (tmp_path / "traces/rank-00000.000.json").write_text(json.dumps({"traceEvents": spans()}))
    for name in ("manifest.json", "ranks/rank-00000.json"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    error = capsys.readouterr().err
    for name in ("manifest.json", "rank-00000.json"):
        assert name in error


def test_a_damaged_ring_or_header_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its contents are reported as unknown, not as zero."""
    (case,) = (case for case in cases() if case.name == "run-rank")
    case.make(tmp_path)
    (tmp_path / "ring").mkdir(exist_ok=True)
    (tmp_path / "ring" / "rank-00000.ring").write_bytes(b"no ring")
    trace = next((tmp_path / "traces").glob("rank-00000.*"))
    trace.write_text('{"a": 1e, "traceEvents": ' + json.dumps(spans()) + "}")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    error = capsys.readouterr().err
    assert "garbage collections and data waits of rank 0 are unknown" in error
    assert f"{trace.name}: the header is damaged" in error
