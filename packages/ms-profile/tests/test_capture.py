"""`ms-profile run` on an unmodified script: real processes, real collectives, every kind of exit.

Runs with `fresh=True` or `--nproc-per-node` start in a new interpreter; the others are forked from
a process that has already imported torch.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ms_profile.analysis.whole_run import analyse
from ms_profile.cli import main
from ms_profile.log.event_reader import EventFilter, read_events
from ms_profile.log.manifest import read_ranks, read_run
from ms_profile.log.ring import Kind, read_ring

pytest.importorskip("torch")
from processes import Command, run_command

SCRIPT = Path(__file__).with_name("train_script.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
RUN = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(SCRIPT)]
WINDOW = ["--skip", "2", "--active", "4", "--windows", "1"]
Finished = subprocess.CompletedProcess[str]


def run(
    folder: Path,
    *script: str,
    options: tuple[str, ...] = (),
    fresh: bool = False,
    limit_bytes: int = 0,
    rc: int = 0,
) -> Finished:
    """Run the script under ms-profile and check the exit code."""
    command = [*RUN, "--output-dir", str(folder), *WINDOW, *options, "--", *script]
    if limit_bytes:
        blocks = limit_bytes // 1024
        command = ["bash", "-c", f'trap "" XFSZ; ulimit -f {blocks}; exec "$@"', "x", *command]
    if fresh or limit_bytes:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=180, env=ENVIRONMENT
        )
    else:
        process = run_command(command[1:], environment=ENVIRONMENT, timeout_s=180)
    assert process.returncode == rc, process.stderr
    return process


def trace_of(folder: Path, rank: int = 0, window: int = 0) -> list[dict[str, Any]]:
    """Return the complete events of a rank's trace."""
    path = folder / "traces" / f"rank-{rank:05d}.{window:03d}.json"
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One process, 12 steps, all metrics."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    metrics = ("--metrics", "operators,memory,compute_time")
    return folder, run(folder, "--steps", "12", options=metrics, fresh=True)


def test_the_script_gives_the_same_output_as_without_profiling(
    single_process_run: tuple[Path, Finished],
) -> None:
    """Arguments are passed on, and stdout with the last loss is identical."""
    plain = run_command([str(SCRIPT), "--steps", "12"], environment=ENVIRONMENT)
    assert plain.returncode == 0, plain.stderr
    assert single_process_run[1].stdout == plain.stdout
    assert "4 of 12 steps traced" in single_process_run[1].stderr


def test_the_window_has_its_steps_with_shapes_and_memory(
    single_process_run: tuple[Path, Finished],
) -> None:
    """Steps 3 to 6 (2 skipped, 1 warmup) are marked by number; operators have shapes."""
    folder = single_process_run[0]
    events = trace_of(folder)
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert steps == {f"ProfilerStep#{number}" for number in (3, 4, 5, 6)}
    products = [event for event in events if event["name"] == "aten::addmm"]
    assert len(products) == 4 * 4
    assert products[0]["args"]["Input Dims"][1] == [4, 32]
    text = (folder / "traces/rank-00000.000.json").read_text()
    assert '"[memory]"' in text
    (rank,) = read_ranks(folder)
    assert (rank.traces[0].first_step, rank.traces[0].steps) == (3, 4)
    assert (rank.status, rank.exit_code, rank.steps, rank.complete) == ("done", 0, 12, True)
    manifest = read_run(folder)
    assert manifest.metrics == ("compute_time", "memory", "operators")
    assert manifest.arguments == ("--steps", "12")


def test_each_step_is_an_event_and_a_span(single_process_run: tuple[Path, Finished]) -> None:
    """The event log has every step once with its duration; the ring has its parts in order."""
    folder = single_process_run[0]
    events = list(read_events(folder, EventFilter(kinds={"step"})))
    assert [event.step for event in events] == list(range(12))
    assert [event.step for event in events if "traced" in event.fields] == [2, 3, 4, 5, 6]
    assert all(float(event.fields["step_time_s"]) > 0 for event in events)
    ring = read_ring(folder / "ring/rank-00000.ring")
    step_5 = [span for span in ring.spans if span["step"] == 5]
    kinds = Counter(Kind(span["kind"]) for span in step_5)
    assert kinds[Kind.STEP] == kinds[Kind.FORWARD] == kinds[Kind.BACKWARD] == 1
    assert kinds[Kind.OPTIMIZER] == 1
    assert kinds[Kind.MODULE] == 6  # two blocks with two layers each
    names = {ring.name_of(span["name"]) for span in step_5}
    assert {"Net", "layers.0", "layers.1.down", "AdamW", "backward"} <= names
    assert all(span["end_ns"] >= span["start_ns"] for span in ring.spans)


PARALLEL = {"ddp": {"gloo:all_reduce"}, "fsdp": {"gloo:all_gather", "gloo:all_reduce"}}


@pytest.mark.parametrize(
    ("parallel", "launcher"),
    [pytest.param("ddp", "ours", marks=pytest.mark.slow), ("fsdp", "torchrun")],
)
def test_every_rank_records_its_collectives_with_durations(
    tmp_path: Path, parallel: str, launcher: str
) -> None:
    """Collectives of DDP and FSDP2 are in each rank's trace and ring without annotations."""
    folder = tmp_path / "out"
    script = ("--parallel", parallel, "--steps", "24", "--pause-s", "0.1")
    if launcher == "ours":
        run(folder, *script, options=("--nproc-per-node", "2"))
    else:
        torchrun = "torch.distributed.run --standalone --nproc-per-node 2 -m ms_profile run"
        options = ["--train-script", str(SCRIPT), "--output-dir", str(folder), *WINDOW]
        arguments = ["-m", *torchrun.split(), *options, "--", *script]
        process = run_command(arguments, environment=ENVIRONMENT, timeout_s=180)
        assert process.returncode == 0, process.stderr
    assert [rank.status for rank in read_ranks(folder)] == ["done", "done"]
    assert read_run(folder).world_size == 2
    counts = []
    for rank in range(2):
        collectives = [
            event for event in trace_of(folder, rank) if event["name"].startswith("gloo:")
        ]
        assert {event["name"] for event in collectives} == PARALLEL[parallel]
        assert all(event["dur"] > 0 for event in collectives)
        counts.append(Counter(event["name"] for event in collectives))
        assert counts[-1].total() % 4 == 0  # the same in all four steps
        ring = read_ring(folder / f"ring/rank-{rank:05d}.ring")
        ring_collectives = ring.spans[ring.spans["kind"] == Kind.COLLECTIVE]
        assert PARALLEL[parallel] <= {ring.name_of(span["name"]) for span in ring_collectives}
        assert (ring_collectives["end_ns"] > ring_collectives["start_ns"]).all()
        # Outside the window the ring has the same number per step as the trace, except for steps
        # during which Kineto's sessions are paused.
        per_step = Counter(int(step) for step in ring_collectives["step"] if 9 <= step < 23)
        assert len(per_step) >= 10
        assert set(per_step.values()) == {counts[-1].total() // 4}
    assert counts[0] == counts[1]


def test_a_failing_script_keeps_its_traceback_exit_code_and_recording(
    tmp_path: Path,
) -> None:
    """The window interrupted by the failure is saved with the steps so far."""
    process = run(tmp_path / "out", "--steps", "7", "--end", "raise", rc=1)
    plain = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "7", "--end", "raise"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stderr.startswith(plain.stderr)
    assert "RuntimeError: the script fails here" in plain.stderr
    (rank,) = read_ranks(tmp_path / "out")
    assert (rank.status, rank.exit_code) == ("failed", 1)
    assert rank.error == "RuntimeError: the script fails here"
    assert rank.traces[0].steps == 3
    assert any(event["name"] == "aten::addmm" for event in trace_of(tmp_path / "out"))


def test_a_ranks_exit_code_is_that_of_the_launcher(tmp_path: Path) -> None:
    """Torchrun itself would return 1."""
    run(
        tmp_path / "out",
        "--parallel",
        "ddp",
        "--end",
        "exit",
        options=("--nproc-per-node", "2"),
        rc=7,
    )
    assert {rank.exit_code for rank in read_ranks(tmp_path / "out")} >= {7}


def test_kill_9_leaves_the_ring_the_events_and_earlier_windows(tmp_path: Path) -> None:
    """Nothing can be saved on SIGKILL, but the last steps are still visible."""
    folder = tmp_path / "out"
    run(folder, "--steps", "40", "--end", "kill", "--pause-s", "0.05", rc=-signal.SIGKILL)
    (rank,) = read_ranks(folder)
    assert rank.status == "running"
    assert rank.traces[0].steps == 4
    ring = read_ring(folder / "ring/rank-00000.ring")
    assert ring.spans["step"].max() == 38
    open_spans = ring.spans[ring.spans["end_ns"] == 0]
    assert {Kind(kind) for kind in open_spans["kind"]} == {Kind.STEP, Kind.BETWEEN}
    steps = [event.step or 0 for event in read_events(folder, EventFilter(kinds={"step"}))]
    assert max(steps) >= 10


def test_sigterm_saves_the_window_and_then_terminates_the_process(tmp_path: Path) -> None:
    """Torchrun sends it to the other ranks when one has failed."""
    folder = tmp_path / "out"
    command = [*RUN, "--output-dir", str(folder), *WINDOW, "--", "--steps", "7", "--end", "hang"]
    log = tmp_path / "log"
    process = Command(command[1:], environment=ENVIRONMENT, log=log)
    try:
        while "hangs\n" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.2)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.end()
    (rank,) = read_ranks(folder)
    assert (rank.status, rank.error) == ("failed", "terminated by SIGTERM")
    assert rank.traces[0].steps == 3


def test_a_full_disk_fails_the_command_and_not_the_script(tmp_path: Path) -> None:
    """Under a limit of 2.5 MB per file the trace is truncated, and the script finishes."""
    script = ("--steps", "300", "--width", "8")
    options = ("--active", "250")
    process = run(tmp_path / "out", *script, options=options, limit_bytes=2_500_000, rc=1)
    assert "loss" in process.stdout
    assert re.search(r"rank 0: .*(disk full|could not be written)", process.stderr)
    (rank,) = read_ranks(tmp_path / "out")
    assert (rank.exit_code, rank.complete, rank.steps) == (0, False, 300)
    assert list((tmp_path / "out").rglob("*.partial")) == []


FULL_DISK = """
mount -t tmpfs -o size=3m tmpfs "$0" || exit 77
"${@:2}"
code=$?
cp -r "$0/out" "$1"
exit $code
"""


def test_a_recording_on_a_full_disk_can_be_read(tmp_path: Path) -> None:
    """On a 3 MB disk the trace is truncated, but log, manifest and report are complete."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    in_mount_namespace = [
        "unshare",
        "--map-root-user",
        "--mount",
        "bash",
        "-c",
        FULL_DISK,
        str(disk),
    ]
    window = ["--active", "250", "--windows", "1", "--metrics", "memory,operators"]
    command = [*RUN, "--output-dir", str(disk / "out"), *window, "--", "--steps", "300"]
    try:
        process = subprocess.run(
            [*in_mount_namespace, str(copy), *command],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if process.returncode == 77 or "unshare" in process.stderr:
        pytest.skip("this user cannot mount")
    assert process.returncode == 1, process.stderr
    assert "loss" in process.stdout
    assert "rank-00000.000.json is truncated" in process.stderr
    assert "Traceback" not in process.stderr
    assert [path.name for path in (copy / "traces").iterdir()] == ["rank-00000.000.json"]
    assert len(list(read_events(copy, EventFilter(kinds={"step"})))) == 300
    (rank,) = read_ranks(copy)
    assert (rank.status, rank.steps, rank.complete) == ("done", 300, False)
    analysis = analyse(copy)
    assert any("truncated" in warning for warning in analysis.warnings)
    assert len(analysis.ranks[0].breakdowns) > 1


def test_a_run_killed_before_its_window_points_to_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is refused in one line that names the log."""
    folder = tmp_path / "out"
    run(folder, "--steps", "6", "--end", "kill", rc=-signal.SIGKILL)
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "saved no window of traced steps" in error
    assert f"ms-profile logs {folder}" in error
    assert len(error.splitlines()) == 1


def test_a_scripts_own_profiler_has_priority(tmp_path: Path) -> None:
    """The script's profiler works as usual, and we report the windows that we skipped."""
    process = run(tmp_path / "out", "--own-profiler", rc=1)
    assert "own profiler saw True" in process.stdout
    assert "the script's own profiler was active" in process.stderr
    assert len(list(read_events(tmp_path / "out", EventFilter(kinds={"step"})))) == 12


def test_too_few_steps_are_explained(tmp_path: Path) -> None:
    """The message says where the first window starts."""
    process = run(tmp_path / "out", "--steps", "3")
    assert "ended after 3 steps and the first window starts at step 3" in process.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train-script", "nowhere.py"], "script nowhere.py does not exist"),
        (["--metrics", "comunication_time"], "did you mean 'communication_time'"),
        (["--active", "0"], "active must be at least 1, got 0"),
        (["--nproc-per-node", "0"], "--nproc-per-node must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, options: list[str], message: str
) -> None:
    """No traceback for user errors, and no output."""
    command = [*RUN, "--output-dir", str(tmp_path / "out"), *options]
    process = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert process.returncode == 2
    assert message in process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_run_is_overwritten_only_with_the_option(
    single_process_run: tuple[Path, Finished],
) -> None:
    """A second run into the same folder is refused; with --overwrite it replaces the first."""
    folder = single_process_run[0]
    process = run(folder, "--steps", "4", rc=2)
    assert "already has a run" in process.stderr
    run(folder, "--steps", "5", options=("--overwrite",))
    assert read_run(folder).arguments == ("--steps", "5")
    assert [path.name for path in (folder / "traces").iterdir()] == ["rank-00000.000.json"]


def test_a_killed_rank_is_named_and_other_recordings_are_kept(tmp_path: Path) -> None:
    """Rank 1 of 2 dies by SIGKILL: its ring and events stay, rank 0 fails and saves its window."""
    folder = tmp_path / "out"
    script = tmp_path / "killed.py"
    script.write_text(
        SCRIPT.read_text().replace("os.kill(", 'if os.environ["RANK"] == "1": os.kill(')
    )
    options = ("--nproc-per-node", "2", "--train-script", str(script))
    process = run(
        folder, "--parallel", "ddp", "--steps", "7", "--end", "kill", options=options, rc=1
    )
    assert "rank 1 left no report: killed by SIGKILL" in process.stderr
    failed, killed = read_ranks(folder)
    assert (failed.status, killed.status) == ("failed", "running")
    assert failed.traces[0].steps >= 3
    ring = read_ring(folder / "ring/rank-00001.ring")
    assert ring.spans["step"].max() == 5
    assert {event.rank for event in read_events(folder)} == {0, 1}


WORKERS = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.ones(8)
if __name__ == "__main__":
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
    print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_dataloader_with_workers_works_as_without_profiling(tmp_path: Path, context: str) -> None:
    """Workers fork or import the script again; neither hangs, and the waits are recorded."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    process = run(tmp_path / "out", context, options=("--train-script", str(script)))
    assert process.stdout == "ended\n"
    ring = read_ring(tmp_path / "out/ring/rank-00000.ring")
    assert Kind.DATA in ring.spans["kind"]


SLOW_ROWS = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.ones(8)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for batch in DataLoader(Rows(), batch_size=1):
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("metric", "selected"), [("data_time", True), ("idle", False)])
def test_waits_for_data_are_logged_if_selected(tmp_path: Path, metric: str, selected: bool) -> None:
    """All of the 1.8 s of loading time, although the script ends before a collection."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_ROWS)
    run(tmp_path / "out", options=("--train-script", str(script), "--metrics", metric))
    steps = list(read_events(tmp_path / "out", EventFilter(kinds={"step"})))
    waits = [event.fields["data_wait_s"] for event in steps if "data_wait_s" in event.fields]
    assert bool(waits) == selected
    # A step is missed between collections; 60 rows are 60 steps.
    assert (sum(map(float, waits)) > 1.2) == selected


GROUPS = """
import sys
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(10):
    model(torch.ones(4, 8)).sum().backward()
    dist.all_reduce(torch.ones(64))
    for other, pair in zip((1, 2), pairs):
        if rank in (0, other):
            dist.all_reduce(torch.ones(64), group=pair)
    optimizer.step()
dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
"""


def test_collectives_are_assigned_to_their_groups_without_names_from_gloo(tmp_path: Path) -> None:
    """Three groups with one message size: every match has the ranks of the actual group."""
    script = tmp_path / "groups.py"
    script.write_text(GROUPS)
    options = ["--train-script", str(script), "--output-dir", str(tmp_path / "out"), *WINDOW]
    torchrun = "torch.distributed.run --standalone --nproc-per-node 3 -m ms_profile run"
    words = ["-m", *torchrun.split(), *options]
    process = run_command(words, environment=ENVIRONMENT, timeout_s=180)
    assert process.returncode == 0, process.stderr
    analysis = analyse(tmp_path / "out")
    ranks_of_collectives = Counter(tuple(sorted(match.starts_ns)) for match in analysis.matched)
    assert ranks_of_collectives == {(0, 1, 2): 4, (0, 1): 4, (0, 2): 4}
    order = [tuple(sorted(match.starts_ns)) for match in analysis.matched[:3]]
    assert order == [(0, 1, 2), (0, 1), (0, 2)]
