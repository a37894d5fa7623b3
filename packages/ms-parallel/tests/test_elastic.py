"""A run under torchrun goes on with as many machines as there are, to the bits of one width."""

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
"""A machine that gives no sign is given up after 3 s, and others are waited for 1 s."""
JOINABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torch's agents do not tell one that joins where the others meet."""
STEPS, BATCH = 60, 12
SETTINGS: dict[str, Any] = {
    "batch_size": BATCH,
    "steps": STEPS,
    "checkpoint_every": 4,
    "reproducible": True,
    "held_out_fraction": 0.0,
}


def test_ranks_meet_whose_launchers_have_counted_restarts_otherwise() -> None:
    """As those of an agent that joined later; each start has a name that none before had."""
    of_ranks = run_processes(2, RUNS, "met_after_restarts", rounds=3)
    assert of_ranks[0] == of_ranks[1]
    assert len(set(of_ranks[0])) == 3


def test_what_the_dead_have_asked_is_not_taken_for_the_living() -> None:
    """A rank of the same number asks anew, and is answered."""
    first, second = run_processes(2, RUNS, "leave_questions")
    assert first == second


def test_a_rank_that_others_stopped_waits_for_its_own_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that its agent does not take the run to be done; alone it waits for nothing."""
    stop = StopRequest()
    stop.signal_name = "SIGTERM"
    began = time.monotonic()
    stop.wait_for_launcher()
    assert time.monotonic() - began < 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with stop.listening():
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        try:
            stop.wait_for_launcher()
        finally:
            signal.signal(signal.SIGALRM, before)
    assert stop.signalled
    assert 0.2 <= time.monotonic() - began < 4


class Machines:
    """Agents of torchrun on this machine, one a machine, whose run is one."""

    def __init__(self, run: Path) -> None:
        self.run, self.started, self.begun = run, 0, 0
        self.agents: list[Command] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def join(self) -> None:
        """One more machine."""
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
        """The machine that came last is gone: its agent and its rank, by kill -9."""
        agent = self.agents.pop()
        signal_process(agent.pid, signal.SIGSTOP)
        for rank in workers(agent.pid):
            signal_process(rank, signal.SIGKILL)
        agent.end()

    def kill_a_rank(self, draw: random.Random) -> None:
        """Kill -9 of any rank, whose machine stays; what is waited for next begins after it."""
        ranks = workers(draw.choice(self.agents).pid)
        self.begun = len(self.widths())
        signal_process(draw.choice(ranks), signal.SIGKILL)

    def widths(self) -> list[int]:
        """Processes of each start of the run so far."""
        return [int(event["layout"].removeprefix("data=")) for event in events(self.run, "begin")]

    def wait(self, width: int, steps: int) -> None:
        """Until so many processes have made so many steps."""
        deadline = time.monotonic() + 240
        while True:
            told = self.widths()[self.begun :][-1:] == [width]
            after = _steps_since_begin(self.run) if told else 0
            if told and after >= steps:
                return
            assert time.monotonic() < deadline, f"no {steps} steps of {width}: {self.widths()}"
            assert all(agent.poll() is None for agent in self.agents), self.log()
            time.sleep(0.02)

    def log(self) -> str:
        """What the agents and their ranks have said."""
        logs = sorted(self.run.parent.glob("agent-*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2500:]}" for log in logs)


def _steps_since_begin(run: Path) -> int:
    text = (run.with_suffix("") / "events.jsonl").read_text()
    kinds = [json.loads(line)["kind"] for line in text.splitlines() if line.endswith("}")]
    return kinds[::-1][: kinds[::-1].index("begin")].count("step")


@contextmanager
def machines(run: Path, count: int) -> Iterator[Machines]:
    """So many, all of which are gone at the end."""
    found = Machines(run)
    try:
        for _ in range(count):
            found.join()
        yield found
    finally:
        for agent in found.agents:
            agent.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    run = write_run(folder / "whole.toml", write_corpus(folder / "corpus"), **SETTINGS)
    done = train(run, 1)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("attempt", range(20))
def test_a_run_that_shrinks_and_grows_comes_to_the_bits_of_one_that_does_not(
    undisturbed: Path, tmp_path: Path, attempt: int
) -> None:
    """4, 2, 3 and 4 machines, of which two are lost by kill -9, and kill -9 of ranks at random.

    The batches, in the order of one undisturbed process; losses and weights to the bit.
    """
    draw = random.Random(attempt)
    settings = {**SETTINGS, "async_checkpoints": bool(attempt % 2)}
    run = write_run(tmp_path / "run.toml", undisturbed.with_suffix("") / "shards", **settings)
    with machines(run, 4) as found:
        found.wait(4, draw.randrange(1, 6))
        found.leave()
        found.leave()
        found.wait(2, draw.randrange(1, 6))
        found.kill_a_rank(draw)
        found.wait(2, draw.randrange(1, 6))
        found.join()
        found.wait(3, draw.randrange(1, 6))
        found.kill_a_rank(draw)
        found.wait(3, draw.randrange(1, 6))
        found.join()
        found.wait(4, 1)
        assert [agent.wait(timeout=300) for agent in found.agents] == [0] * 4, found.log()
        assert found.widths()[-1] == 4
    assert losses(run) == losses(undisturbed)
    assert weights(run) == weights(undisturbed)


@pytest.mark.slow
def test_a_pipeline_with_the_rest_on_data_comes_to_the_same_at_other_widths(tmp_path: Path) -> None:
    """Two stages on two processes, killed, and on four: losses and weights to the bit."""
    settings = {"batch_size": BATCH, "held_out_fraction": 0.0, "reproducible": True, "steps": 12}
    whole = write_run(tmp_path / "whole.toml", write_corpus(tmp_path / "corpus"), **settings)
    assert train(whole, 1).returncode == 0
    run = write_run(tmp_path / "run.toml", whole.with_suffix("") / "shards", **settings)
    run.write_text(run.read_text() + '[parallel_config]\ndata = "rest"\npipeline = 2\n')
    with training(run, 2) as started:
        wait_for(lambda: len(events(run, "step")) > 4, started)
        signal_process(workers(started.pid)[0], signal.SIGKILL)
        started.wait(timeout=120)
    done = train(run, 4)
    assert done.returncode == 0, done.stderr
    assert [event["layout"] for event in events(run, "begin")] == [
        "pipeline=2",
        "data=2,pipeline=2",
    ]
    assert losses(run) == losses(whole)
    assert _tensors(run) == _tensors(whole)


def _tensors(run: Path) -> dict[str, bytes]:
    """The bytes of each tensor of the trained model, whichever file it stands in."""
    files = (run.with_suffix("") / "model").glob("*.safetensors")
    return {name: t.numpy().tobytes() for file in files for name, t in load_file(file).items()}
