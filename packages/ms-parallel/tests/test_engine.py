"""The engine of one process against a plain loop, and its behavior when something goes wrong."""

import math
import os
import socket
import subprocess
import sys
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command, run_processes
from runs import OPTIMIZER, VARIANTS, VOCABULARY, build, global_batch, tiny, train
from torch import Tensor
from torch.nn import functional as F

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss, Output
from ms_parallel.entry import exit_code
from ms_parallel.errors import (
    ConfigError,
    LaunchError,
    ModelError,
    ParallelError,
    ScheduleError,
    StageError,
)
from ms_parallel.models import build_model
from ms_parallel.models.batch import Batch
from ms_parallel.operators import linear_cross_entropy
from ms_parallel.optim.optimizer import learning_rate
from ms_parallel.optim.optimizers.adamw import AdamWConfig
from ms_parallel.training.options import Options
from ms_parallel.weights import initialize

RUNS = Path(__file__).parent / "runs.py"
FAULTS = Path(__file__).parent / "faults.py"


@pytest.fixture(scope="module")
def groups() -> Groups:
    """Groups of a single process."""
    return connect(Layout(), device="cpu")


def plain_loop(settings: dict[str, Any], steps: int) -> tuple[list[float], list[float]]:
    """The same training in plain PyTorch: full batches, torch's optimizer and clipping."""
    model = build_model(tiny(**settings))
    initialize(model, seed=0)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    losses, norms = [], []
    for step in range(steps):
        batch = global_batch(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, OPTIMIZER)
        logits = model(batch["tokens"], positions=batch["positions"], documents=batch["documents"])
        token_losses = F.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="none"
        ).view_as(batch["targets"])
        counted = batch["weights"] * (batch["targets"] != -100)
        loss = (token_losses * counted).sum() / counted.sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_engine_trains_as_a_plain_loop_does(groups: Groups, variant: str) -> None:
    """Losses and gradient norms of ten steps; 1e-5 allows for float32 sums in a different order."""
    losses, norms = plain_loop(VARIANTS[variant], 10)
    engine_losses_and_norms = train(build(VARIANTS[variant], groups), 10)
    assert engine_losses_and_norms[0] == pytest.approx(losses, rel=1e-5)
    assert engine_losses_and_norms[1] == pytest.approx(norms, rel=1e-5)


def test_mixed_precision_keeps_float32_weights_and_similar_losses(groups: Groups) -> None:
    """bfloat16 has 8 bits, so a loss near 4 is exact to about 2%."""
    engine = build({}, groups, mixed_precision=True)
    losses, _ = train(engine, 20)
    expected, _ = train(build({}, groups), 20)
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses != expected
    assert {tensor.dtype for tensor in engine.parameters.values()} == {torch.float32}


class NotFinite(NextTokenLoss):
    """Loss with an infinite or NaN gradient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """The loss times the value."""
        return super().__call__(output, batch) * self.value


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_nonfinite_gradient_changes_nothing(groups: Groups, value: float) -> None:
    """Weights and moments keep their bits, and the next update works."""
    engine = build({}, groups)
    train(engine, 2)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    update = engine.step(global_batch(0), NotFinite(value))
    assert update.skipped
    after = engine.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "engine.step")
    assert engine.step_count == 3
    assert not engine.step(global_batch(0), NextTokenLoss()).skipped


def test_a_nonfinite_gradient_raises_on_request(groups: Groups) -> None:
    """The error names the update, and weights are unchanged."""
    engine = build({}, groups, on_nonfinite="raise")
    before = engine.parameters["model.norm.weight"].clone()
    with pytest.raises(ParallelError, match="update 0: loss nan"):
        engine.step(global_batch(0), NotFinite(math.nan))
    assert torch.equal(before, engine.parameters["model.norm.weight"])


def test_a_batch_without_targets_is_skipped(groups: Groups) -> None:
    """No division by zero, and no weight decay."""
    engine = build({}, groups)
    batch = global_batch(0)
    batch["targets"].fill_(-100)
    before = engine.parameters["lm_head.weight"].clone()
    assert engine.step(batch, NextTokenLoss()).skipped
    assert torch.equal(before, engine.parameters["lm_head.weight"])


def test_batches_may_be_numpy_arrays(groups: Groups) -> None:
    """The loss is the same."""
    batch = global_batch(0)
    arrays = {name: value.numpy() for name, value in batch.items()}
    losses = [build({}, groups).step(b, NextTokenLoss()).loss for b in (batch, arrays)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("number", [VOCABULARY, -1, 2**40])
@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_an_out_of_range_token_is_refused_with_its_row(
    groups: Groups, name: str, number: int
) -> None:
    """In updates, evaluations, prompts and custom modules; weights stay unchanged."""
    engine = build({}, groups)
    before = engine.parameters["lm_head.weight"].clone()
    batch = global_batch(0)
    batch[name][2, 3] = number
    message = f"{name} must be below the vocabulary size of {VOCABULARY}, got {number} in row 2"
    for candidate in (engine, Engine(build_model(tiny()))):
        with pytest.raises(ConfigError, match=message):
            candidate.step(batch, NextTokenLoss())
        with pytest.raises(ConfigError, match=message):
            candidate.evaluate(batch, lambda output, rows: output.token_losses(rows["targets"]))
        with pytest.raises(ConfigError, match=f"got {number} in row 1"):
            candidate.generate([[1], [2, number]], max_new_tokens=2)
    assert torch.equal(before, engine.parameters["lm_head.weight"])


def test_invalid_settings_are_named(groups: Groups) -> None:
    """Rows, optimizer, schedule, recompute and layout; each message gives the remedy."""
    with pytest.raises(ConfigError, match="at least one row per batch, got 0"):
        build({}, groups).step(global_batch(0, rows=0), NextTokenLoss())
    with pytest.raises(ConfigError, match="needs measured costs; call search_schedule first"):
        build({}, groups, schedule="search")
    with pytest.raises(ConfigError, match="optimizer is 'adammw'; did you mean 'AdamW'"):
        Options(model_arch="llama", optimizer="adammw")
    with pytest.raises(
        ConfigError, match="max_grad_norm must be a number of at least 1e-30, got 0"
    ):
        AdamWConfig(max_grad_norm=0)
    with pytest.raises(ScheduleError, match="unknown schedule 'zb-w'; did you mean 'zb-v'"):
        build({}, groups, schedule="zb-w")
    with pytest.raises(ConfigError, match="recompute is 'some'"):
        build({}, groups, recompute="some")
    with pytest.raises(LaunchError, match="needs 2 processes"):
        Engine(tiny(), Layout(data=2), device="cpu")


def test_the_learning_rate_warms_up_linearly_and_decays_by_a_cosine() -> None:
    """Peak after warmup, the mean of peak and floor halfway, then constant."""
    config = AdamWConfig(learning_rate=1.0, warmup_steps=10, decay_steps=110, final_ratio=0.2)
    assert [learning_rate(step, config) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(10, config) == pytest.approx(1.0)
    assert learning_rate(60, config) == pytest.approx(0.6)
    assert learning_rate(110, config) == learning_rate(500, config) == pytest.approx(0.2)


@pytest.mark.parametrize("layout", ["data=2", "tensor=2", "pipeline=2"])
def test_the_same_layout_twice_gives_the_same_bits(layout: str) -> None:
    """All weights and moments of every process after four steps."""
    twice = run_processes(2, FAULTS, "digests", layout=layout)
    assert all(first == second for first, second in twice)


def test_a_failing_stage_ends_the_other_stages() -> None:
    """All ranks, including indirect waiters, name the failed stage, rank and microbatch."""
    # run_processes would time out after 60 s; the timeout of a message is 600 s.
    for result in run_processes(3, FAULTS, "raise_on_last_stage", check=False, timeout_s=60):
        message = result["failed"].strip().splitlines()[-1]
        assert message.endswith(
            "StageError: stage 2 on rank 2 failed at 2F1, microbatch 1: RuntimeError: a fault of"
            " this test"
        )


def test_an_error_of_a_stage_keeps_its_class_on_every_rank() -> None:
    """`except ModelError` catches it, and the exit code is the same as for a ModelError."""
    error = StageError.of("ModelError", "stage 0 on rank 0 failed")
    assert isinstance(error, ModelError)
    assert isinstance(error, StageError)
    assert exit_code(error) == exit_code(ModelError())
    copied = copy(error)
    assert isinstance(copied, ModelError)
    assert str(copied) == "stage 0 on rank 0 failed"
    for name in ("RuntimeError", "StageError", "Any", ""):
        assert type(StageError.of(name, "a text")) is StageError
    assert exit_code(StageError.of("RuntimeError", "a text")) == 1


def test_all_processes_skip_an_update_with_one_nonfinite_stage() -> None:
    """The decision is based on the full gradient, so no process steps alone."""
    for skipped, unchanged in run_processes(2, FAULTS, "not_finite_on_last_stage"):
        assert skipped
        assert unchanged


def test_vocabulary_parallel_losses_and_gradients_equal_torch() -> None:
    """The vocabulary-parallel loss against F.cross_entropy, in one chunk and in many."""
    # float32 sums over 24 logits and 10 rows: 1e-6 is about ten roundings.
    assert all(max(errors) < 1e-6 for errors in run_processes(2, FAULTS, "split_loss_errors"))


@pytest.mark.parametrize("wrong", [24, 10**6, -1, -101])
def test_an_out_of_range_target_of_a_split_vocabulary_is_refused(wrong: int) -> None:
    """On both processes, which would otherwise read its logit as 0; one process refuses it too."""
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(torch.randn(1, 6), torch.randn(24, 6), torch.tensor([wrong]))
    for messages in run_processes(2, FAULTS, "foreign_targets", wrong=wrong):
        assert [f"index {wrong} is out of bounds" in m for m in messages] == [True, True], messages


def test_mixed_precision_works_under_every_axis() -> None:
    """Losses equal one process's within the precision of bfloat16."""
    (expected,) = run_processes(1, FAULTS, "mixed_precision_losses", layouts=["data=1"])
    for results in run_processes(
        2, FAULTS, "mixed_precision_losses", layouts=["data=2", "tensor=2", "pipeline=2"]
    ):
        for losses in results:
            assert losses == pytest.approx(expected[0], rel=0.02)


def test_a_launched_process_exits_cleanly(tmp_path: Path) -> None:
    """Under torchrun a script that only builds an engine exits with 0 and without warnings."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(RUNS.parent)!r})\n"
        "from runs import *\n"
        "train(build({}, connect(Layout(data=2), device='cpu')), 1)\n"
    )
    result = torchrun(script)
    assert result.returncode == 0, result.stderr
    assert "destroy_process_group" not in result.stderr
    assert "terminate called" not in result.stderr


def test_a_start_without_torchrun_prints_the_command(tmp_path: Path) -> None:
    """`python train.py --x` prints the torchrun command if two processes are needed."""
    script = tmp_path / "train.py"
    script.write_text(
        "from ms_parallel.cluster.connection import connect\n"
        "from ms_parallel.cluster.layout import Layout\n"
        "connect(Layout(data=2), device='cpu')\n"
    )
    result = run_command([script.name, "--x"], folder=tmp_path)
    assert "torchrun --standalone --nproc-per-node 2 train.py --x" in result.stderr


def test_a_port_in_use_gives_a_one_line_error(tmp_path: Path) -> None:
    """The error names the address and the remedy."""
    (tmp_path / "train.py").write_text(
        "from ms_parallel.errors import LaunchError\n"
        "from ms_parallel.cluster.connection import connect\n"
        "from ms_parallel.cluster.layout import Layout\n"
        "try:\n    connect(Layout(), device='cpu')\n"
        "except LaunchError as error:\n    print(error)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        launch = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        variables = {**os.environ, **launch, "MASTER_PORT": str(port)}
        result = run_command(["train.py"], folder=tmp_path, environment=variables)
    (line,) = result.stdout.splitlines()
    assert f"127.0.0.1:{port}" in line
    assert "--master-port" in line


def torchrun(script: Path) -> "subprocess.CompletedProcess[str]":
    """Run a script in two processes under torch's agent."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
