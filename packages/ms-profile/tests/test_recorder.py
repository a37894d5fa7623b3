"""The recorder on real models: step detection, recorded spans, and cleanup."""

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
    """A layer that is optionally recomputed in the backward pass."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.recompute = recompute

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        """Map (B, 8) to (B, 8)."""
        if self.recompute:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """A recorder that is attached to torch."""
    with Recorder(tmp_path / "r.ring") as attached:
        attached.attach()
        yield attached


def spans_of(recorder: Recorder) -> RingRecording:
    """Return the recording so far, including Kineto records."""
    recorder.release_kineto()
    return read_ring(recorder.ring.path)


def kinds_in_step(recording: RingRecording, step: int) -> Counter[Kind]:
    """Return the number of spans of each kind in a step."""
    return Counter(Kind(span["kind"]) for span in recording.spans if span["step"] == step)


def test_gradient_accumulation_is_one_step(recorder: Recorder) -> None:
    """Three forwards and backwards before an optimizer step belong to one step."""
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert recorder.steps == 2  # the third step ends with the next forward
    kinds = kinds_in_step(spans_of(recorder), 1)
    assert (kinds[Kind.FORWARD], kinds[Kind.BACKWARD], kinds[Kind.OPTIMIZER]) == (3, 3, 1)
    assert kinds[Kind.MODULE] == 3


def test_two_alternating_optimizers_are_one_step(recorder: Recorder) -> None:
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


def test_training_without_a_module_has_steps(recorder: Recorder) -> None:
    """With plain parameters, the optimizer alone defines the steps."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    for _ in range(4):
        weight.sum().backward()
        optimizer.step()
    assert recorder.steps == 3


def test_steps_of_a_custom_update_are_marked(recorder: Recorder) -> None:
    """Two microbatches per step and a custom update, marked by `mark_step`."""
    model = Block()
    for _ in range(4):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        mark_step(model)
    assert recorder.steps == 3
    kinds = kinds_in_step(spans_of(recorder), 2)
    assert (kinds[Kind.FORWARD], kinds[Kind.MODULE], kinds[Kind.BETWEEN]) == (2, 2, 1)


class CustomUpdate(torch.optim.Optimizer):
    """A custom update as a torch optimizer whose step takes an argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([{"params": list(model.parameters())}], {})

    def step(self, change: float) -> None:  # type: ignore[override]
        """Add `change` to every weight."""
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight += change


def test_a_custom_optimizer_step_is_detected(recorder: Recorder) -> None:
    """Two microbatches per step, no mark, a `step` with arguments: detected by torch's hooks."""
    model = Block()
    update = CustomUpdate(model)
    for _ in range(4):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        update.step(0.5)
    assert recorder.steps == 3
    kinds = kinds_in_step(spans_of(recorder), 2)
    assert (kinds[Kind.FORWARD], kinds[Kind.MODULE], kinds[Kind.OPTIMIZER]) == (2, 2, 1)


def test_a_process_without_weights_still_has_steps(recorder: Recorder) -> None:
    """A pipeline stage may have no trainable parameters."""
    update = CustomUpdate(nn.Identity())
    for _ in range(4):
        update.step(0.5)
    assert recorder.steps == 3


def test_marks_alone_define_steps(recorder: Recorder) -> None:
    """Without a module; a mark without a recorder does nothing."""
    for _ in range(4):
        mark_step()
    assert recorder.steps == 3
    recorder.close()
    mark_step()
    assert recorder.steps == 4  # closing ended the last step


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
def test_script_scopes_across_step_boundaries_are_safe(tmp_path: Path, scope: str) -> None:
    """Otherwise a scope's end would be written into freed memory of a finished session."""
    script = tmp_path / "scoped.py"
    script.write_text(SCOPED)
    process = run_command([str(script), str(tmp_path / "r.ring"), scope], timeout_s=120)
    assert process.returncode == 0, process.stderr
    assert ("'epoch' open over several steps" in process.stdout) == (scope == "epoch")
    recording = read_ring(tmp_path / "r.ring")
    names = Counter(recording.name_of(span["name"]) for span in recording.spans)
    assert names["step"] == 600
    assert names["train step"] > (150 if scope == "step" else 0)


def test_a_recomputed_forward_is_part_of_the_backward_pass(recorder: Recorder) -> None:
    """Recomputation neither starts a step nor ends the backward span."""
    model = Block(recompute=True)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    recording = spans_of(recorder)
    kinds = kinds_in_step(recording, 1)
    assert (kinds[Kind.FORWARD], kinds[Kind.BACKWARD], kinds[Kind.MODULE]) == (1, 1, 2)


def test_evaluation_has_no_backward(recorder: Recorder) -> None:
    """A forward pass without gradients has no backward span."""
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
    """Training that catches it continues with a clean state."""
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
    """The model is restored, and nothing is recorded anymore."""
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


def test_waits_for_data_and_user_spans_are_recorded(tmp_path: Path) -> None:
    """A slow source shows as data spans of its length; `span` adds user-defined spans."""
    with Recorder(tmp_path / "r.ring") as recorder:

        def slow() -> Iterator[int]:
            for number in range(3):
                time.sleep(0.02)
                yield number

        assert list(recorder.batches(slow())) == [0, 1, 2]
        with recorder.span("checkpoint"):
            pass
        recording = read_ring(recorder.ring.path)
    data = recording.spans[recording.spans["kind"] == Kind.DATA]
    assert ((data["end_ns"] - data["start_ns"])[:3] >= 20_000_000).all()
    assert recording.name_of(recording.spans["name"][-1]) == "checkpoint"


def test_long_garbage_collections_are_recorded(tmp_path: Path) -> None:
    """A full collection over many objects has its generation and length."""
    with Recorder(tmp_path / "r.ring") as recorder:
        objects = [[number] for number in range(200_000)]
        gc.collect()
        recording = read_ring(recorder.ring.path)
    del objects
    garbage = recording.spans[recording.spans["kind"] == Kind.GARBAGE]
    longest = garbage[(garbage["end_ns"] - garbage["start_ns"]).argmax()]
    assert recording.name_of(longest["name"]) == "gc generation 2"


@pytest.mark.parametrize(("cost_ms", "due_at_ms"), [(0.1, 2000), (0.6, 3000), (9.0, 10_000)])
def test_slow_kineto_collections_run_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost_ms: float, due_at_ms: int
) -> None:
    """Collection and restart use at most 1/2,500 of the time, or run every 10 seconds.

    The first start, which initializes Kineto and is slow everywhere, does not count.
    """
    from ms_profile.recording import scopes

    now_ms, busy_ns = [0], [0]

    def thread_time_ns() -> int:
        busy_ns[0] += int(cost_ms * 1e6)
        return busy_ns[0]

    def run_steps() -> None:
        for step in range(scopes.MIN_SESSION_STEPS):
            recorder.begin_step(step)

    ring = Ring(tmp_path / "a.ring")
    recorder = scopes.ScopeRecorder(ring)
    clocks = SimpleNamespace(
        monotonic_ns=lambda: now_ms[0] * 1_000_000, thread_time_ns=thread_time_ns
    )
    monkeypatch.setattr(scopes, "time", clocks)
    recorder.start()
    try:
        run_steps()
        now_ms[0] = 2000
        assert recorder.due()
        recorder.stop()
        now_ms[0] = 0
        recorder.start()
        run_steps()
        now_ms[0] = due_at_ms - 1
        assert not recorder.due()
        now_ms[0] = due_at_ms
        assert recorder.due()
    finally:
        recorder.stop()
        ring.close()


def test_no_session_ends_while_messages_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage requests its first message before its forward; that Work's scope ends later.

    torch ends it on a thread of the process group, which remembers the session: in freed memory.
    """
    from ms_profile.recording.scopes import ScopeRecorder

    in_flight_at_stop: list[bool] = []
    original_stop, in_flight = ScopeRecorder.stop, False

    def recording_stop(self: ScopeRecorder) -> None:
        in_flight_at_stop.extend([in_flight] * self.on)
        original_stop(self)

    monkeypatch.setattr(ScopeRecorder, "stop", recording_stop)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    with Recorder(tmp_path / "r.ring", collect_interval_s=0.0) as recorder:
        recorder.attach()
        for _ in range(30):
            in_flight = True
            model(torch.ones(2, 8)).sum().backward()
            in_flight = False
            optimizer.step()
    assert len(in_flight_at_stop) >= 4  # one comes from closing
    assert not any(in_flight_at_stop)


def test_without_kineto_scopes_only_collectives_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Kineto cannot be restricted, the rest is recorded and the reason stored."""
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


def test_importing_the_package_does_not_import_torch() -> None:
    """Torch is an optional dependency."""
    code = "import sys, ms_profile, ms_profile.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
