"""Runs in which something goes wrong, or must not."""

import contextlib
import hashlib
import inspect
import io
import os
import re
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from runs import build, global_batch, train
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn import functional as F

from ms_parallel.cluster import connection
from ms_parallel.cluster import error_report as exits
from ms_parallel.cluster.agreement import run_on_rank_zero
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.watch import Heartbeat, position
from ms_parallel.engine.loss import NextTokenLoss, Output
from ms_parallel.models.batch import Batch
from ms_parallel.operators.split_vocabulary import VocabularyParallelLoss
from ms_parallel.split.part import local_part


def digests(layout: str) -> list[str]:
    """Digest of all local state after each of two equal runs."""
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=60)
    results = []
    for _ in range(2):
        engine = build({"tie_word_embeddings": True}, groups)
        train(engine, 4)
        digest = hashlib.sha256()
        for name, tensor in sorted(engine.state_dict().items()):
            digest.update(name.encode() + local_part(tensor).contiguous().numpy().tobytes())
        results.append(digest.hexdigest())
    return results


class Faulty(NextTokenLoss):
    """Loss that fails in the second microbatch; only the last stage calls it."""

    calls = 0

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """Next-token loss of the first microbatch."""
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("a fault of this test")
        return super().__call__(output, batch)


def raise_on_last_stage() -> None:
    """Fail on the last stage; the others must not wait for their own timeout of 600 s."""
    engine = build({}, connect(Layout(pipeline=3), device="cpu", timeout_s=600))
    engine.step(global_batch(0), Faulty())


class NotFinite(NextTokenLoss):
    """A loss of NaN."""

    def __call__(self, output: Output, batch: Batch) -> Tensor:
        """NaN, with NaN gradients."""
        return super().__call__(output, batch) * float("nan")


def not_finite_on_last_stage() -> tuple[bool, bool]:
    """Whether the update was skipped, and whether all local weights kept their bits."""
    engine = build({}, connect(Layout(pipeline=2), device="cpu", timeout_s=60))
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    update = engine.step(global_batch(0), NotFinite())
    unchanged = all(torch.equal(before[name], p) for name, p in engine.parameters.items())
    return update.skipped, unchanged


def split_loss_errors() -> list[float]:
    """Maximum errors of losses and both gradients, for several chunk sizes."""
    groups = connect(Layout(tensor=2), device="cpu", timeout_s=60)
    group, rank = groups.group("tensor"), groups.place.tensor
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 6, generator=generator)
    weight = torch.randn(24, 6, generator=generator)
    targets = torch.randint(0, 24, (10,), generator=generator)
    targets[3] = -100
    factors = torch.rand(10, generator=generator)
    full_hidden, full_weight = (x.clone().requires_grad_() for x in (hidden, weight))
    expected = F.cross_entropy(full_hidden @ full_weight.T, targets, reduction="none")
    (expected * factors).sum().backward()
    errors = []
    for limit_bytes in (1, 200, 2**20):
        local_hidden = hidden.clone().requires_grad_()
        local_weight = weight[rank * 12 :][:12].clone().requires_grad_()
        losses = VocabularyParallelLoss.apply(
            local_hidden, local_weight, targets, group, limit_bytes
        )
        (losses * factors).sum().backward()
        dist.all_reduce(local_hidden.grad, group=group)
        errors += [
            float((losses - expected).abs().max()),
            float((local_hidden.grad - full_hidden.grad).abs().max()),
            float((local_weight.grad - full_weight.grad[rank * 12 :][:12]).abs().max()),
        ]
    return errors


def foreign_targets(wrong: int) -> list[str]:
    """Messages about a target outside the 24 classes, with many chunks and with one."""
    groups = connect(Layout(tensor=2), device="cpu", timeout_s=60)
    hidden, weight = torch.randn(4, 6), torch.randn(12, 6)
    targets = torch.tensor([0, -100, 23, wrong])
    messages = []
    for limit_bytes in (1, 2**20):
        try:
            losses = VocabularyParallelLoss.apply(
                hidden, weight, targets, groups.group("tensor"), limit_bytes
            )
            messages.append(f"losses {losses.tolist()}")
        except (IndexError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def mixed_precision_losses(layouts: list[str]) -> list[list[float]]:
    """Losses in mixed precision with recomputation, under each layout."""
    return [
        train(
            build(
                {"tie_word_embeddings": True},
                connect(Layout.parse(layout), device="cpu", timeout_s=60),
                mixed_precision=True,
                recompute="full",
            ),
            3,
        )[0]
        for layout in layouts
    ]


def wait_for_rank_2(behavior: str) -> tuple[int, str]:
    """Exit code and error output if rank 2 of 3 does not join a collective.

    Args:
        behavior: rank 2 is "stopped", "slow", "killed" before, or calls "another" collective.
    """
    connection.join(Layout(data=3), timeout_s=60)
    position.step, position.activity = 7, "update"
    dist.all_reduce(torch.ones(1))
    distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    if dist.get_rank() == 2 and behavior != "another":
        _stay_away(behavior)
    stderr = io.StringIO()
    try:
        if dist.get_rank() == 2 and behavior == "another":
            dist.all_gather([torch.ones(1) for _ in range(3)], torch.ones(1))
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        with contextlib.redirect_stderr(stderr):
            code = exits.report_error(error)
        assert code is not None
        pid_match = re.search(r"process (\d+)", stderr.getvalue())
        # With "another" it may be this process, whose result is needed.
        if pid_match and behavior != "another":
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid_match[1]), signal.SIGKILL)
        return code, stderr.getvalue()
    return 0, ""


def _stay_away(behavior: str) -> None:
    time.sleep(1.5)  # so that its heartbeats and messages have arrived
    if behavior == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behavior == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # killed by the rank that names it


def rank_0_stops_while_it_acts() -> str:
    """Rank 0 acts for the others, who wait without a timeout; then it is stopped."""
    connection.join(Layout(data=2), timeout_s=60)
    run_on_rank_zero(lambda: None)
    assert Heartbeat.running is not None
    Heartbeat.running.timeout_s = 2.0
    run_on_rank_zero(lambda: _stay_away("stopped"))
    return "returned"


def line_of_the_wait() -> int:
    """Line where `wait_for_rank_2` waits."""
    lines, first = inspect.getsourcelines(wait_for_rank_2)
    waits = [number for number, line in enumerate(lines) if "dist.all_reduce" in line]
    return first + waits[-1]
