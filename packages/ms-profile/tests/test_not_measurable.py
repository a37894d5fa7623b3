"""Unmeasurable values are reported as such: no NaN, no percentage of zero, no traceback."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, needs_browser

from ms_profile.cli import main

NONSENSE = re.compile(
    r"\b[Nn]a[Nn]\b|\b[Ii]nf(inity)?\b|undefined|\bnull\b|\bNone\b|(?<![\d.])0%|(?<![\d+-])0\.0%"
)
OPEN_ALL = """
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
for (let part = 1; part <= 9; part++) press(String(part));
"""
ALL_DRAWN = (
    "[...document.querySelectorAll('#panels section')].filter("
    "(part) => part.textContent.trim().split(/\\s+/).length > 3).length === 9"
)


def span(name: str, label: str, start_us: float, length: float, **fields: Any) -> dict[str, Any]:
    """Return one event of the main thread, in µs."""
    return {"ph": "X", "cat": label, "name": name, "pid": 1, "tid": 1, "ts": start_us,
            "dur": length, **fields}  # fmt: skip


def steps(count: int, *, gloo: bool = True, first: int = 3) -> list[dict[str, Any]]:
    """Return steps of 100 µs with an operator, and an all-reduce on gloo's thread."""
    events = []
    for number in range(count):
        start_us = 100.0 * number
        events.append(span(f"ProfilerStep#{first + number}", "user_annotation", start_us, 100.0))
        events.append(span("aten::mm", "cpu_op", start_us + 5, 40.0, args={"Input Dims": [[2, 2]]}))
        if gloo:
            events.append(span("gloo:all_reduce", "user_annotation", start_us + 50, 20.0, tid=2))
    return events


allocation = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 5.0, "s": "t",
              "args": {"Bytes": 64, "Total Allocated": 64, "Device Type": 0}}  # fmt: skip
RUNS: dict[str, list[list[dict[str, Any]]]] = {
    "one_step": [steps(1), steps(1)],
    "no_steps": [[span("aten::mm", "cpu_op", 0, 10)]],
    "no_collectives": [steps(5, gloo=False), steps(5, gloo=False)],
    "one_rank": [steps(5)],
    "collectives_of_one_rank": [steps(5), steps(5, gloo=False)],
    "unequal_steps": [steps(6), steps(5, first=40)],
    "no_time_at_all": [[span("aten::mm", "cpu_op", 3, 0)]],
    "steps_of_no_time": [[span(f"ProfilerStep#{n}", "user_annotation", n, 0) for n in range(6)]],
    "scopes_alone": [[span("forward", "user_annotation", 0, 10)]],
    "allocations_alone": [[allocation]],
    "kernels_alone": [[span("gemm", "kernel", 0, 10), span("gemm", "kernel", 12, 10)]],
}


@pytest.fixture(params=RUNS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the traces of one such run."""
    (tmp_path / "traces").mkdir()
    for rank, events in enumerate(RUNS[request.param]):
        path = tmp_path / "traces" / f"rank-{rank}.json"
        path.write_text(json.dumps({"traceEvents": events}))
    return tmp_path / "traces"


def test_the_commands_print_no_invalid_values(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`report` prints numbers or null; `compare` compares, or names the missing data."""
    assert main(["report", str(folder)]) == 0
    captured = capsys.readouterr()
    assert not NONSENSE.search(captured.out), captured.out
    assert main(["report", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert len(facts["ranks"]) == len(list(folder.glob("rank-*")))
    code = main(["compare", str(folder), str(folder)])
    captured = capsys.readouterr()
    assert not NONSENSE.search(captured.out), captured.out
    assert code == (0 if "steps compared" in captured.out else 2)
    assert code == 0 or "comparing needs at least 4" in captured.err


@needs_browser
def test_the_page_shows_no_invalid_values(folder: Path, tab: Tab) -> None:
    """All nine parts are rendered, and unknown values are described in words."""
    assert main(["report", str(folder)]) == 0
    tab.render(folder / "report.html")
    tab.evaluate(OPEN_ALL)
    tab.wait_for(ALL_DRAWN)
    document = tab.evaluate("document.documentElement.outerHTML")
    main_part = document[document.index('<main id="panels">') : document.index("<footer>")]
    sections = main_part.split("<section")[1:]
    assert len(sections) == 9
    for section in sections:
        shown = re.sub(r"<script.*?</script>", "", section, flags=re.DOTALL)
        words = re.sub(r"<[^>]*>", " ", shown)
        titles = re.findall(r'(?:title|aria-label|style)="([^"]*)"', shown)
        for text in (words, *titles):
            assert not NONSENSE.search(text.replace("width: 0%", "")), text
        assert len(words.split()) > 3, words
