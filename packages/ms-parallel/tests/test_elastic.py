"""A run under torchrun continues on the machines that are available, bit-identical to one width."""

import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launching import (
    IMPORTS,
    TRAIN,
    environment,
    events,
    losses,
    signal_process,
    train,
    training,
    wait_for,
    weights,
    workers,
    write_corpus,
    write_run,
)
from processes import Command, run_processes
from safetensors.torch import load_file

from ms_parallel.cluster.agreement import StopRequest

RUNS = Path(__file__).parent / "elastic_runs.py"
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,close_timeout=5"
"""A silent machine is given up after 3 s; the rendezvous waits 1 s for others."""
JOINABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Needed so that torch's agents tell a joining agent the address of the others."""
STEPS, BATCH = 60, 12
SETTINGS: dict[str, Any] = {
    "batch_size": BATCH,
    "steps": STEPS,
    "checkpoint_every": 4,
    "reproducible": True,
    "held_out_fraction": 0.0,
}


def test_ranks_connect_with_different_restart_counts() -> None:
    """An agent that joined later has counted fewer; every start has a new name."""
    names_by_rank = run_processes(2, RUNS, "names_after_restarts", rounds=3)
    assert names_by_rank[0] == names_by_rank[1]
    assert len(set(names_by_rank[0])) == 3


def test_requests_of_a_dead_rank_are_ignored() -> None:
    """A new rank with the same number asks again and gets an answer."""
    first, second = run_processes(2, RUNS, "meet_after_dead_rank")
    assert first == second


def test_a_rank_stopped_by_others_waits_for_its_own_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its agent would consider the run finished; a single process does not wait."""
    stop = StopRequest()
    stop.signal_name = "SIGTERM"
    start = time.monotonic()
    stop.wait_for_launcher()
    assert time.monotonic() - start < 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with stop.listening():
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        try:
            stop.wait_for_launcher()
        finally:
            signal.signal(signal.SIGALRM, before)
    assert stop.signalled
    assert 0.2 <= time.monotonic() - start < 4


class Machines:
    """torchrun agents on this machine, each acting as one machine of a run."""

    def __init__(self, run: Path) -> None:
        self.run, self.started, self.past_starts = run, 0, 0
        self.agents: list[Command] = []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]

    def join(self) -> None:
        """Add a machine."""
        self.started += 1
        launch = ["-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", "1"]
        launch += ["--rdzv-backend", "c10d", "--rdzv-id", "run", "--max-restarts", "1000"]
        launch += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", QUICK]
        launch += ["--local-addr", "127.0.0.1"]
        self.agents.append(
            Command(
                [*launch, *TRAIN, str(self.run)],
                environment=environment(**JOINABLE),
                log=self.run.with_name(f"agent-{self.started}.log"),
                imports=IMPORTS,
            )
        )

    def leave(self) -> None:
        """Kill the agent and rank of the last machine with SIGKILL."""
        agent = self.agents.pop()
        signal_process(agent.pid, signal.SIGSTOP)
        for rank in workers(agent.pid):
            signal_process(rank, signal.SIGKILL)
        agent.end()

    def kill_a_rank(self, rng: random.Random) -> None:
        """Kill a random rank with SIGKILL, not its machine; `wait` then expects a later start."""
        ranks = workers(rng.choice(self.agents).pid)
        self.past_starts = len(self.widths())
        signal_process(rng.choice(ranks), signal.SIGKILL)

    def widths(self) -> list[int]:
        """Number of processes in each start of the run."""
        return [int(event["layout"].removeprefix("data=")) for event in events(self.run, "begin")]

    def wait(self, width: int, steps: int) -> None:
        """Wait until `width` processes have made `steps` steps."""
        deadline = time.monotonic() + 240
        while True:
            has_width = self.widths()[self.past_starts :][-1:] == [width]
            done = _steps_since_begin(self.run) if has_width else 0
            if has_width and done >= steps:
                return
            assert time.monotonic() < deadline, f"no {steps} steps of {width}: {self.widths()}"
            assert all(agent.poll() is None for agent in self.agents), self.log()
            time.sleep(0.02)

    def log(self) -> str:
        """Output of the agents and their ranks."""
        logs = sorted(self.run.parent.glob("agent-*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2500:]}" for log in logs)


def _steps_since_begin(run: Path) -> int:
    text = (run.with_suffix("") / "events.jsonl").read_text()
    events = [json.loads(line)["kind"] for line in text.splitlines() if line.endswith("}")]
    return events[::-1][: events[::-1].index("begin")].count("step")


@contextmanager
def machines(run: Path, count: int) -> Iterator[Machines]:
    """Start machines, and kill all at the end."""
    machines = Machines(run)
    try:
        for _ in range(count):
            machines.join()
        yield machines
    finally:
        for agent in machines.agents:
            agent.end()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    run = write_run(folder / "whole.toml", write_corpus(folder / "corpus"), **SETTINGS)
    result = train(run, 1)
    assert result.returncode == 0, result.stderr
    return run


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("attempt", range(20))
def test_a_run_that_shrinks_and_grows_is_bit_identical_to_an_uninterrupted_one(
    uninterrupted: Path, tmp_path: Path, attempt: int
) -> None:
    """4, 2, 3 and 4 machines; two machines and random ranks are killed with SIGKILL.

    Batch order, losses and weights equal those of one uninterrupted process, bit for bit.
    """
    rng = random.Random(attempt)
    settings = {**SETTINGS, "async_checkpoints": bool(attempt % 2)}
    run = write_run(tmp_path / "run.toml", uninterrupted.with_suffix("") / "shards", **settings)
    with machines(run, 4) as cluster:
        cluster.wait(4, rng.randrange(1, 6))
        cluster.leave()
        cluster.leave()
        cluster.wait(2, rng.randrange(1, 6))
        cluster.kill_a_rank(rng)
        cluster.wait(2, rng.randrange(1, 6))
        cluster.join()
        cluster.wait(3, rng.randrange(1, 6))
        cluster.kill_a_rank(rng)
        cluster.wait(3, rng.randrange(1, 6))
        cluster.join()
        cluster.wait(4, 1)
        assert [agent.wait(timeout=300) for agent in cluster.agents] == [0] * 4, cluster.log()
        assert cluster.widths()[-1] == 4
    assert losses(run) == losses(uninterrupted)
    assert weights(run) == weights(uninterrupted)


@pytest.mark.slow
def test_a_pipeline_with_data_rest_is_bit_identical_at_other_widths(tmp_path: Path) -> None:
    """Two stages on two processes, killed, then on four: losses and weights are bit-identical."""
    settings = {"batch_size": BATCH, "held_out_fraction": 0.0, "reproducible": True, "steps": 12}
    uninterrupted = write_run(
        tmp_path / "whole.toml", write_corpus(tmp_path / "corpus"), **settings
    )
    assert train(uninterrupted, 1).returncode == 0
    run = write_run(tmp_path / "run.toml", uninterrupted.with_suffix("") / "shards", **settings)
    run.write_text(run.read_text() + '[parallel_config]\ndata = "rest"\npipeline = 2\n')
    with training(run, 2) as started:
        wait_for(lambda: len(events(run, "step")) > 4, started)
        signal_process(workers(started.pid)[0], signal.SIGKILL)
        started.wait(timeout=120)
    result = train(run, 4)
    assert result.returncode == 0, result.stderr
    assert [event["layout"] for event in events(run, "begin")] == [
        "pipeline=2",
        "data=2,pipeline=2",
    ]
    assert losses(run) == losses(uninterrupted)
    assert _tensors(run) == _tensors(uninterrupted)


def _tensors(run: Path) -> dict[str, bytes]:
    """Bytes of each tensor of the trained model, across its files."""
    files = (run.with_suffix("") / "model").glob("*.safetensors")
    return {name: t.numpy().tobytes() for file in files for name, t in load_file(file).items()}
