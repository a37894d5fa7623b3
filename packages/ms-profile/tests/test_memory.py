"""`ms-profile memory`: peak by category, module and line; hostile files give one line."""

import json
import os
import pickle
import struct
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec
import pytest
from browser import Tab, needs_browser
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_snapshots import CachingAllocator, train

from ms_profile.analysis.memory_use import MemoryUse, analyse_memory, read_prediction
from ms_profile.cli import main
from ms_profile.errors import TraceError
from ms_profile.files.plain_pickle import read_plain_pickle
from ms_profile.report.page import write_memory_page

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 100), 1 << 100) | st.text()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    | st.lists(inner, max_size=5).map(tuple),
)  # fmt: skip


@settings(max_examples=25)
@given(PLAIN, st.integers(2, 5))
def test_plain_containers_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    """For every protocol that torch may use."""
    with NamedTemporaryFile() as file:
        file.write(pickle.dumps(value, protocol))
        file.flush()
        assert read_plain_pickle(Path(file.name), error=TraceError) == value


@pytest.fixture
def use(tmp_path: Path) -> tuple[MemoryUse, Any]:
    """A simulated training's memory, and the truth."""
    snapshot = train()
    (device,) = analyse_memory(snapshot.write(tmp_path / "snapshot.pickle"))
    return device, snapshot


def test_the_peak_and_its_categories_are_those_of_the_allocator(
    use: tuple[MemoryUse, Any],
) -> None:
    """To the byte, although the snapshot has no categories."""
    device, snapshot = use
    assert device.totals.peak == snapshot.allocator.peak
    assert sum(device.categories.values()) == device.totals.peak
    assert device.categories == {**snapshot.at_peak, "unknown": 0}
    assert min(size for name, size in snapshot.at_peak.items() if name != "buffers") > 0
    assert device.highest["gradients"] > device.categories["gradients"]
    assert device.highest["weights"] == device.categories["weights"]
    assert sum(row.size_bytes for row in device.live) == device.totals.peak
    timeline = device.timeline
    curves = zip(*timeline["categories"].values(), strict=True)
    assert max(sum(values) for values in curves) == device.totals.peak


def test_lines_and_modules_at_the_peak_are_the_scripts(use: tuple[MemoryUse, Any]) -> None:
    """The innermost line outside of torch, and the chain of forwards."""
    device, snapshot = use
    lines, modules = dict(device.lines), dict(device.modules)
    assert lines["user/model.py:12 __init__"] == snapshot.at_peak["weights"]
    # AdamW's state has no line of the script except the call of step.
    assert lines["user/train.py:40 main"] == snapshot.at_peak["moments"]
    assert sum(lines.values()) == sum(modules.values()) == device.totals.peak
    assert modules["Block > MLP > linear"] == snapshot.at_peak["activations"]


def test_reserved_memory_and_fragmentation_are_the_segments(use: tuple[MemoryUse, Any]) -> None:
    """Reserved over time ends at the segments' sum; free blocks are those not in use."""
    device, snapshot = use
    segments = snapshot.allocator.segments
    reserved = sum(block.size for blocks in segments for block in blocks)
    free = [block.size for blocks in segments for block in blocks if not block.in_use]
    facts = device.fragmentation
    assert facts is not None
    assert (facts["reserved"], facts["free"]) == (reserved, sum(free))
    assert (facts["largest_free"], facts["segments"]) == (max(free), len(segments))
    assert facts["releasable"] == sum(
        sum(block.size for block in blocks)
        for blocks in segments
        if not any(block.in_use for block in blocks)
    )
    assert device.totals.peak_reserved == reserved == device.timeline["reserved"][-1]
    assert device.timeline["reserved"][0] < reserved


def test_recording_that_starts_late_keeps_the_total(tmp_path: Path) -> None:
    """Blocks allocated earlier keep their size and, from the segments, their call stacks."""
    snapshot = train(record_from=2)
    (device,) = analyse_memory(snapshot.write(tmp_path / "snapshot.pickle"))
    assert device.totals.peak == snapshot.allocator.peak
    assert device.categories["weights"] == snapshot.at_peak["weights"]
    assert device.categories["moments"] == snapshot.at_peak["moments"]


def test_an_out_of_memory_error_is_explained(tmp_path: Path) -> None:
    """Size, free memory of the device, and the largest free block."""
    snapshot = train(steps=1)
    snapshot.allocator.entries.append(
        {"action": "oom", "size": 3 << 30, "device_free": 1 << 30, "stream": 0, "frames": []}
    )
    (device,) = analyse_memory(snapshot.write(tmp_path / "snapshot.pickle"))
    assert [failure["size_bytes"] for failure in device.out_of_memory] == [3 << 30]
    assert device.notes[0].startswith(
        "an allocation of 3.00 GiB failed: the device has 1.00 GiB free, and the allocator holds"
    )


@pytest.mark.slow
def test_torchs_own_viewer_reads_the_simulated_snapshots() -> None:
    """The simulated snapshots have the structure of real snapshots."""
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = train()
    text = viewer.segsum(snapshot.allocator.snapshot())
    allocated = sum(b.size for s in snapshot.allocator.segments for b in s if b.in_use)
    assert f"total_allocated: {viewer.Bytes(allocated)}" in text


class Evil:
    """Pickles as a call of `os.system`."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/ms-profile-was-here",)


def nested(depth: int) -> bytes:
    """A pickle of tuples nested in a key."""
    return b"\x80\x04}" + b")" + b"\x85" * depth + b"Ns."


HOSTILE = {
    "a function": pickle.dumps({"segments": [Evil()], "device_traces": []}),
    "a class": pickle.dumps({"segments": [Path("x")], "device_traces": []}),
    "a persistent id": b"\x80\x04Px\n.",
    "a deeply nested key": nested(100_000),
    "a key that is a list": b"\x80\x04}]Ns.",
    "a huge string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "a huge integer": b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b"x.",
    "a huge memo index": b"\x80\x04]r" + b"\xff\xff\xff\x7f" + b".",
    "nothing after the protocol": b"\x80\x04",
    "an empty stack": b"\x80\x04a.",
    "text": b"\x80hello",
    "a list": pickle.dumps([1, 2]),
    "an empty snapshot": pickle.dumps({"segments": [], "device_traces": []}),
    "a list of numbers": pickle.dumps({"segments": [1], "device_traces": [[1, 2]]})[:-20],
    "an empty file": b"",
    "a gzip file": b"\x1f\x8b\x08\x00aaaa",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_give_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Exit code 2, no page, and nothing is executed."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(HOSTILE[case])
    assert main(["memory", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ms-profile: ")
    assert len(error.splitlines()) == 1
    assert not Path("/tmp/ms-profile-was-here").exists()
    assert [item.name for item in tmp_path.iterdir()] == ["snapshot.pickle"]


def test_every_truncation_of_a_snapshot_gives_one_line(tmp_path: Path) -> None:
    """A snapshot has no redundancy, so a truncated one is refused."""
    content = pickle.dumps(train(blocks=1, steps=1, width=1024).allocator.snapshot())
    path = tmp_path / "snapshot.pickle"
    for size in range(0, len(content) - 1, 61):
        path.write_bytes(content[:size])
        with pytest.raises(TraceError, match="pickle"):
            analyse_memory(path)


def test_repeated_lists_are_refused_before_they_take_quadratic_time(tmp_path: Path) -> None:
    """A pickle of a few bytes can repeat one list any number of times."""
    entries = CachingAllocator().entries
    entries.append({"action": "alloc", "addr": 1, "size": 512, "frames": []})
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [entries] * 50}))
    with pytest.raises(TraceError, match="share one list"):
        analyse_memory(path)


def test_malformed_entries_are_skipped_and_counted(tmp_path: Path) -> None:
    """The other entries are shown."""
    snapshot = train(steps=1)
    bad: list[Any] = [7, {"action": "alloc"}, {"action": "alloc", "addr": "x", "size": 512},
                      {"action": "alloc", "addr": 1, "size": -5}]  # fmt: skip
    snapshot.allocator.entries.extend(bad)
    (device,) = analyse_memory(snapshot.write(tmp_path / "snapshot.pickle"))
    assert device.totals.peak == snapshot.allocator.peak
    assert "4 damaged entries of the snapshot were skipped" in device.notes


def test_memory_is_compared_with_a_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a plan's JSON or from a list of ranks; a wrong file is refused."""
    ranks = [dict.fromkeys(("weights", "gradients", "moments", "activations", "buffers"), size)
             | {"pipeline": rank} for rank, size in enumerate((1 << 20, 3 << 20))]  # fmt: skip
    plan, listed, wrong = (tmp_path / name for name in ("plan.json", "ranks.json", "wrong.json"))
    plan.write_text(json.dumps({"best": [{"memory": ranks, "layout": {}}], "devices": 2}))
    listed.write_text(json.dumps(ranks))
    wrong.write_text('{"best": []}')
    assert read_prediction(plan) == read_prediction(listed, pipeline_rank=1)
    assert read_prediction(plan)["weights"] == 3 << 20
    path = str(train(steps=1).write(tmp_path / "snapshot.pickle"))
    assert main(["memory", path, "--predicted", str(plan), "--pipeline-rank", "0", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["predicted"]["moments"] == 1 << 20
    for options in (["--predicted", str(wrong)],
                    ["--predicted", str(plan), "--pipeline-rank", "2"]):  # fmt: skip
        assert main(["memory", path, *options]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_output_of_predict_memory_is_a_prediction(tmp_path: Path) -> None:
    """As JSON; ms-parallel's own type, so that a new category is noticed."""
    planner = pytest.importorskip("ms_parallel.planner.rank_memory")
    rank = planner.RankMemory(
        pipeline=0, weights=1, gradients=2, moments=3, activations=4, buffers=5
    )
    path = tmp_path / "ranks.json"
    path.write_bytes(msgspec.json.encode([rank]))
    predicted = read_prediction(path)
    assert sum(predicted.values()) == rank.total
    assert {"pipeline", *predicted} == set(rank.__struct_fields__)


def test_memory_events_of_a_trace_give_the_profilers_peak(tmp_path: Path) -> None:
    """A real trace of a CPU: the allocator's total, moments and gradients."""
    torch = pytest.importorskip("torch")
    from torch.profiler import profile

    layer = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    with profile(profile_memory=True, with_stack=True) as profiler:
        for _ in range(2):
            layer(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    (device,) = analyse_memory(tmp_path / "trace.json")
    events = [event["args"]["Total Allocated"]
              for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
              if event["name"] == "[memory]"]  # fmt: skip
    assert device.totals.peak == max(events)
    assert device.categories["gradients"] == 256 * 256 * 4
    assert device.categories["moments"] == pytest.approx(2 * 256 * 256 * 4, abs=64)
    assert device.fragmentation is None


@needs_browser
def test_the_page_draws_the_peak(tmp_path: Path, tab: Tab) -> None:
    """Title, categories, treemap and tables, without a request to the network."""
    (device,) = analyse_memory(train().write(tmp_path / "snapshot.pickle"))
    page = tmp_path / "memory.html"
    write_memory_page([device], page, title="<b>run</b>")
    document = tab.render(page)
    assert 'data-ready="yes"' in document
    body = document.split("<body")[1].split("<script")[0]
    assert "&lt;b&gt;run&lt;/b&gt;" in body
    assert body.count('class="cell"') >= 4
    assert "user/model.py:12 __init__" in body
    assert "http" not in body
