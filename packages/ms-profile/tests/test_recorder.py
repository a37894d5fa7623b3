"""The recorder on real models: what a step is, what is watched, and that nothing is left behind."""

import gc
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ms_profile.log.ring import Kind, Ring, RingRecording, read_ring
from ms_profile.recording.recorder import Recorder, mark_step

torch = pytest.importorskip("torch")
from processes import run_command  # noqa: E402 - torch may be missing
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


class Block(nn.Module):  # type: ignore[misc]
    """A layer that may be recomputed in the backward pass."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.recompute = recompute

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        """(B, 8) to (B, 8)."""
        if self.recompute:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """A recorder that is attached to torch."""
    with Recorder(tmp_path / "r.ring") as made:
        made.attach()
        yield made


def spans_of(recorder: Recorder) -> RingRecording:
    """What it has recorded so far, its Kineto records included."""
    recorder.release_kineto()
    return read_ring(recorder.ring.path)


def kinds_in_step(found: RingRecording, step: int) -> Counter[Kind]:
    """How many spans of each kind a step has."""
    return Counter(Kind(span["kind"]) for span in found.spans if span["step"] == step)


def test_gradient_accumulation_is_one_step(recorder: Recorder) -> None:
    """Three forwards and backwards before an optimizer's step belong to one step."""
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert recorder.steps == 2  # the third is not over until the next forward
    kinds = kinds_in_step(spans_of(recorder), 1)
    assert (kinds[Kind.FORWARD], kinds[Kind.BACKWARD], kinds[Kind.OPTIMIZER]) == (3, 3, 1)
    assert kinds[Kind.MODULE] == 3


def test_two_optimizers_that_step_in_turn_are_one_step(recorder: Recorder) -> None:
    """As in adversarial or actor-critic training."""
    models = [Block(), Block()]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    for _ in range(4):
        for model in models:
            model(torch.ones(2, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert recorder.steps == 3
    assert kinds_in_step(spans_of(recorder), 2)[Kind.OPTIMIZER] == 2


def test_a_training_that_calls_no_model_still_has_steps(recorder: Recorder) -> None:
    """Parameters without a module that is called: the optimizer alone shows the steps."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    for _ in range(4):
        weight.sum().backward()
        optimizer.step()
    assert recorder.steps == 3


def test_steps_of_another_optimizer_are_marked(recorder: Recorder) -> None:
    """Weights changed by other code, two microbatches a step: found by `mark_step`."""
    model = Block()
    for _ in range(4):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        mark_step(model)
    assert recorder.steps == 3
    kinds = kinds_in_step(spans_of(recorder), 2)
    assert (kinds[Kind.FORWARD], kinds[Kind.MODULE], kinds[Kind.BETWEEN]) == (2, 2, 1)


class OwnUpdate(torch.optim.Optimizer):
    """An engine's own update, as a step of torch's optimizer that takes what it likes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([{"params": list(model.parameters())}], {})

    def step(self, change: float) -> None:  # type: ignore[override]
        """Add `change` to every weight."""
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight += change


def test_an_engine_is_seen_where_its_update_is_an_optimizers_step(recorder: Recorder) -> None:
    """Two microbatches a step, no mark, a `step` with arguments: found by torch's hooks alone."""
    model = Block()
    update = OwnUpdate(model)
    for _ in range(4):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        update.step(0.5)
    assert recorder.steps == 3
    kinds = kinds_in_step(spans_of(recorder), 2)
    assert (kinds[Kind.FORWARD], kinds[Kind.MODULE], kinds[Kind.OPTIMIZER]) == (2, 2, 1)


def test_a_process_without_weights_still_has_steps(recorder: Recorder) -> None:
    """A pipeline's stage may hold no parameter that is trained."""
    update = OwnUpdate(nn.Identity())
    for _ in range(4):
        update.step(0.5)
    assert recorder.steps == 3


def test_marks_alone_make_steps_too(recorder: Recorder) -> None:
    """Where no module is called; and a mark without a recorder does nothing."""
    for _ in range(4):
        mark_step()
    assert recorder.steps == 3
    recorder.close()
    mark_step()
    assert recorder.steps == 4  # the last was over


SCOPED = """
import sys
import torch
from ms_profile import Recorder
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
with Recorder(sys.argv[1], collect_interval_s=0.0) as recorder:
    recorder.attach()
    for epoch in range(30):
        scope = torch.profiler.record_function("epoch") if sys.argv[2] == "epoch" else None
        if scope: scope.__enter__()
        for step in range(20):
            with torch.profiler.record_function("train step"):
                model(torch.ones(2, 8)).sum().backward()
                rubbish = [bytes(number) for number in range(500)]
                optimizer.step()
        if scope: scope.__exit__(None, None, None)
print(recorder.problem)
"""


@pytest.mark.parametrize("scope", ["step", "epoch"])
def test_scopes_of_the_script_that_enclose_a_boundary_are_no_danger(
    tmp_path: Path, scope: str
) -> None:
    """A scope's end is written into freed memory if its session is over and another is open."""
    script = tmp_path / "scoped.py"
    script.write_text(SCOPED)
    done = run_command([str(script), str(tmp_path / "r.ring"), scope], timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert ("'epoch' open over several steps" in done.stdout) == (scope == "epoch")
    recorded = read_ring(tmp_path / "r.ring")
    names = Counter(recorded.name_of(span["name"]) for span in recorded.spans)
    assert names["step"] == 600
    assert names["train step"] > (150 if scope == "step" else 0)


def test_a_recomputed_forward_is_part_of_the_backward_pass(recorder: Recorder) -> None:
    """Recomputation neither begins a step nor ends the backward span."""
    model = Block(recompute=True)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    found = spans_of(recorder)
    kinds = kinds_in_step(found, 1)
    assert (kinds[Kind.FORWARD], kinds[Kind.BACKWARD], kinds[Kind.MODULE]) == (1, 1, 2)


def test_evaluation_has_no_backward(recorder: Recorder) -> None:
    """A forward without gradients is followed by no backward span."""
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 8))
    kinds = kinds_in_step(spans_of(recorder), 2)
    assert kinds[Kind.FORWARD] == 1
    assert kinds[Kind.BACKWARD] == 0


def test_an_exception_in_a_forward_closes_its_spans(recorder: Recorder) -> None:
    """Training that catches it goes on with a clean slate."""
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 9))
    model(torch.ones(2, 8)).sum().backward()
    forwards = [span for span in spans_of(recorder).spans if span["kind"] == Kind.FORWARD]
    assert len(forwards) == 2
    assert all(span["end_ns"] > 0 for span in forwards)


def test_closing_removes_every_hook(tmp_path: Path) -> None:
    """The model is as before, and nothing is recorded any more."""
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    callbacks = len(gc.callbacks)
    with Recorder(tmp_path / "r.ring") as recorder:
        recorder.attach()
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert model._forward_hooks
    assert not model._forward_hooks
    assert not model.inner._forward_pre_hooks
    assert len(gc.callbacks) == callbacks
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert recorder.steps == 2


def test_waits_for_data_and_own_spans_are_recorded(tmp_path: Path) -> None:
    """A slow source shows as data spans of its length; `span` names what a user wants to see."""
    with Recorder(tmp_path / "r.ring") as recorder:

        def slow() -> Iterator[int]:
            for number in range(3):
                time.sleep(0.02)
                yield number

        assert list(recorder.batches(slow())) == [0, 1, 2]
        with recorder.span("checkpoint"):
            pass
        found = read_ring(recorder.ring.path)
    data = found.spans[found.spans["kind"] == Kind.DATA]
    assert ((data["end_ns"] - data["start_ns"])[:3] >= 20_000_000).all()
    assert found.name_of(found.spans["name"][-1]) == "checkpoint"


def test_long_garbage_collections_are_recorded(tmp_path: Path) -> None:
    """A full collection over many objects shows with its generation and length."""
    with Recorder(tmp_path / "r.ring") as recorder:
        kept = [[number] for number in range(200_000)]
        gc.collect()
        found = read_ring(recorder.ring.path)
    del kept
    garbage = found.spans[found.spans["kind"] == Kind.GARBAGE]
    longest = garbage[(garbage["end_ns"] - garbage["start_ns"]).argmax()]
    assert found.name_of(longest["name"]) == "gc generation 2"


@pytest.mark.parametrize(("each_ms", "due_at_ms"), [(0.1, 2000), (0.6, 3000), (9.0, 10_000)])
def test_a_collection_that_takes_long_comes_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_ms: float, due_at_ms: int
) -> None:
    """It and the start after it take one part in 2,500 of the time, or 10 seconds are waited.

    The first start, which sets Kineto up and takes long everywhere, does not count.
    """
    from ms_profile.recording import scopes

    now, busy = [0], [0]

    def thread_time_ns() -> int:
        busy[0] += int(each_ms * 1e6)
        return busy[0]

    def steps() -> None:
        for step in range(scopes.MIN_SESSION_STEPS):
            recorder.begin_step(step)

    ring = Ring(tmp_path / "a.ring")
    recorder = scopes.ScopeRecorder(ring)
    clocks = SimpleNamespace(monotonic_ns=lambda: now[0] * 1_000_000, thread_time_ns=thread_time_ns)
    monkeypatch.setattr(scopes, "time", clocks)
    recorder.start()
    try:
        steps()
        now[0] = 2000
        assert recorder.due()
        recorder.stop()
        now[0] = 0
        recorder.start()
        steps()
        now[0] = due_at_ms - 1
        assert not recorder.due()
        now[0] = due_at_ms
        assert recorder.due()
    finally:
        recorder.stop()
        ring.close()


def test_no_session_ends_while_messages_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage asks for its first message before its forward; the end of that Work's scope is late.

    torch writes it from a thread of the group's, which remembers the session: into freed memory.
    """
    from ms_profile.recording.scopes import ScopeRecorder

    asked: list[bool] = []
    stop, waiting = ScopeRecorder.stop, False

    def watched(self: ScopeRecorder) -> None:
        asked.extend([waiting] * self.on)
        stop(self)

    monkeypatch.setattr(ScopeRecorder, "stop", watched)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    with Recorder(tmp_path / "r.ring", collect_interval_s=0.0) as recorder:
        recorder.attach()
        for _ in range(30):
            waiting = True
            model(torch.ones(2, 8)).sum().backward()
            waiting = False
            optimizer.step()
    assert len(asked) >= 4  # one is the end's
    assert not any(asked)


def test_a_torch_without_scopes_costs_the_collectives_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Kineto cannot be restricted, the rest is recorded and the reason kept."""
    from ms_profile.recording.scopes import ScopeRecorder

    def refuse(self: ScopeRecorder) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(ScopeRecorder, "start", refuse)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    with Recorder(tmp_path / "r.ring") as recorder:
        recorder.attach()
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert recorder.steps == 3
    assert recorder.problem == (
        "this torch version exposes no collectives outside the traced windows: no such argument"
    )


def test_importing_the_package_imports_no_torch() -> None:
    """Torch is an extra."""
    code = "import sys, ms_profile, ms_profile.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
