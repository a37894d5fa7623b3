"""`ProfilerCallback` under the real Trainer of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_profile import Kind, StepMetrics, read_events, read_ring

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def callback(folder: Path, **options: Any) -> Any:
    """Return the callback, whose module needs transformers."""
    from ms_profile.huggingface import ProfilerCallback

    return ProfilerCallback(folder, **options)


def train(folder: Path, *, max_steps: int, resume: bool = False, **settings: Any) -> Any:
    """Train a small Llama with the callback; return the Trainer."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 8))]
    arguments = transformers.TrainingArguments(
        folder / "trainer",
        max_steps=max_steps,
        per_device_train_batch_size=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        include_num_input_tokens_seen="all",
        **settings,
    )
    trainer = transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[callback(folder / "profile")],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_events_have_what_the_trainer_logs(tmp_path: Path) -> None:
    """Also its evaluations and checkpoints, and a second training that resumes the first."""
    trainer = train(tmp_path, max_steps=4)
    events = list(read_events(tmp_path / "profile"))
    kinds = [event.kind for event in events]
    assert kinds[0] == "begin"
    assert kinds[-1] == "end"
    assert events[-1].fields == {"step": 4, "finished": 1}
    assert [event.step for event in events if event.kind == "checkpoint"] == [2, 4]
    steps = [StepMetrics.of(event) for event in events if event.kind == "step"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.loss for step in steps] == [entry["loss"] for entry in logged]
    assert [step.grad_norm for step in steps] == [entry["grad_norm"] for entry in logged]
    for step in steps:
        assert step.step_time_s is not None
        assert step.rate_tokens_per_s == pytest.approx(16 / step.step_time_s)  # 2 rows of 8
    losses = [event.fields["eval_loss"] for event in events if event.kind == "evaluate"]
    history = trainer.state.log_history
    assert losses == [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    train(tmp_path, max_steps=6, resume=True)
    later = list(read_events(tmp_path / "profile"))[len(events) :]
    assert (later[0].kind, later[0].step) == ("resume", 4)
    assert [event.step for event in later if event.kind == "step"] == [5, 6]


def test_the_ring_has_a_span_for_each_step_and_module(tmp_path: Path) -> None:
    """`ms-profile report` draws it."""
    train(tmp_path, max_steps=4)
    ring = read_ring(tmp_path / "profile" / "rank-00000.ring")
    counts = {kind: int(np.sum(ring.spans["kind"] == kind)) for kind in (Kind.STEP, Kind.MODULE)}
    assert counts[Kind.STEP] >= 3
    assert counts[Kind.MODULE] > 0


def test_without_recording_there_is_no_ring(tmp_path: Path) -> None:
    """And before a training begins, nothing is written."""
    callback(tmp_path / "profile", record=False)
    assert not (tmp_path / "profile").exists()
