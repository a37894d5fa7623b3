"""SFT, DPO and reward models: learning, reports, errors, and exact resume after kill -9."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Command
from safetensors.torch import load_file

from ms_align import Sample
from ms_align.cli import main
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.errors import CheckpointError, ConfigError, DataError, ModelError, NothingToLearnError
from ms_align.losses.sft import SFTLoss
from ms_align.models.reward_model import RewardModel
from ms_align.rewards.scoring import ModuleReward
from ms_align.run.loop import Result, RunLog
from ms_align.run.samples import SamplePrompts
from ms_align.streams.task_sampler import TaskOptions
from ms_align.trainers.dpo import DPOTrainer
from ms_align.trainers.reward import RewardTrainer
from ms_align.trainers.sft import SFTOptions, SFTTrainer
from ms_data import InstructionStream, PreferenceStream
from ms_parallel import load_model

from .small_models import decoder


def quiet(folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    """Return settings of a small run without progress output."""
    return {"model": decoder(), "steps": steps, "output_dir": folder, "progress": False, **options}


def instructions(sets: Path, **options: Any) -> InstructionStream:
    """Open a packed stream of both tasks."""
    sources = {"copy": sets / "copy", "reverse": sets / "reverse"}
    return InstructionStream(sources, **{"sequence_length": 128, "batch_size": 4, **options})


def held_out(sets: Path) -> Iterator[Any]:
    """Open the held-out data of both tasks."""
    return instructions(sets, split="held_out", epochs=1)


def events(folder: Path, event_kind: str) -> list[dict[str, Any]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == event_kind]


def test_packing_does_not_change_loss_and_gradient(sets: Path) -> None:
    """No leakage between documents: sums of 300 float32 tokens in another order, 1e-5 relative."""
    results = []
    for open_rows in (8, 0):
        model = decoder()
        stream = instructions(sets, open_rows=open_rows, epochs=1, batch_size=1000, shuffle=False)
        batch = {name: torch.as_tensor(value) for name, value in next(stream).items()}
        has_targets = (batch["targets"] >= 0).any(1)
        batch = {name: value[has_targets] for name, value in batch.items()}
        engine = LocalEngine(model, OptimizerOptions(max_grad_norm=None))
        results.append(engine.step(batch, SFTLoss()))
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)


def test_sft_samples_tasks_by_difficulty_and_logs_them(sets: Path, tmp_path: Path) -> None:
    """Held-out loss falls; probability, loss and share of each task are logged."""
    tasks = TaskOptions(warmup_steps=2, temperature=0.2)
    trainer = SFTTrainer(**quiet(tmp_path, 25), tasks=tasks, learning_rate=3e-3)
    result = trainer.train(instructions(sets), held_out=lambda: held_out(sets))
    assert result.last["held_out_loss"] < 0.6 * result.first["held_out_loss"]
    assert {"held_out_loss.copy", "held_out_loss.reverse"} <= set(result.last)
    task_events = events(tmp_path, "tasks")
    assert len(task_events) == 25
    chances = np.array([[e["probability.copy"], e["probability.reverse"]] for e in task_events])
    assert chances.sum(axis=1) == pytest.approx(1)
    assert chances[0] == pytest.approx(0.5)
    assert abs(chances[-1, 0] - 0.5) > 0.005


def test_task_weights_can_be_set_or_learned(sets: Path, tmp_path: Path) -> None:
    """A weight of 0 removes a task's gradient; learned weights are logged and move away from 1."""
    batch = next(instructions(sets))
    rows = {name: torch.as_tensor(value) for name, value in batch.items()}
    assert set(rows["task"].tolist()) == {0, 1}
    second_task = {name: value[rows["task"] == 1] for name, value in rows.items()}
    norms = []
    for selected, loss in (
        (rows, SFTLoss(tasks=2, task_weights=(0.0, 1.0), per_row=True)),
        (second_task, SFTLoss(tasks=2, per_row=True)),
    ):
        engine = LocalEngine(decoder(), OptimizerOptions(max_grad_norm=None))
        update = engine.step(selected, loss)
        norms.append(update.grad_norm * loss.weight(selected))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    trainer = SFTTrainer(**quiet(tmp_path, 4), uncertainty=True, uncertainty_rate=0.5)
    trainer.train(instructions(sets))
    assert events(tmp_path, "tasks")[-1]["factor.copy"] != 1.0
    with pytest.raises(ConfigError, match="remove one"):
        SFTOptions(uncertainty=True, task_weights={"copy": 1.0})


@pytest.mark.parametrize("free", [False, True])
def test_dpo_prefers_the_chosen_answers(sets: Path, tmp_path: Path, free: bool) -> None:
    """The margin starts at 0 and most held-out pairs end up ranked correctly."""
    stream = PreferenceStream(sets / "pairs", sequence_length=64, batch_size=8)
    trainer = DPOTrainer(**quiet(tmp_path, 15), reference_free=free, learning_rate=1e-3)
    result = trainer.train(
        stream,
        held_out=lambda: PreferenceStream(
            sets / "pairs", sequence_length=64, batch_size=4, split="held_out", epochs=1
        ),
    )
    assert result.last["held_out_margin"] > result.first["held_out_margin"] + 0.5
    if not free:  # without a reference the shorter answer starts far ahead
        assert result.first["held_out_margin"] == pytest.approx(0, abs=1e-5)
        assert result.last["held_out_accuracy"] >= 0.9
        assert events(tmp_path, "step")[-1]["accuracy"] >= 0.9


@pytest.mark.parametrize("loss_type", ["simpo", ["ipo", "sft"], "apo_zero"])
def test_dpo_variants_prefer_the_chosen_answers(
    sets: Path, tmp_path: Path, loss_type: str | list[str]
) -> None:
    """SimPO without a reference model, a list of losses, and a loss on each answer separately."""
    trainer = DPOTrainer(**quiet(tmp_path, 15), loss_type=loss_type, learning_rate=1e-3)
    result = trainer.train(
        PreferenceStream(sets / "pairs", sequence_length=64, batch_size=8),
        held_out=lambda: PreferenceStream(
            sets / "pairs", sequence_length=64, batch_size=4, split="held_out", epochs=1
        ),
    )
    assert result.last["held_out_loss"] < result.first["held_out_loss"]
    assert result.last["held_out_accuracy"] >= 0.9


def test_dpo_resumes_only_with_its_own_reference(sets: Path, tmp_path: Path) -> None:
    """Another reference or initial model would give another result."""

    def train(steps: int, start: int = 0, reference: int | None = None) -> Result:
        return DPOTrainer(
            **{**quiet(tmp_path, steps), "model": decoder(seed=start)},
            reference_model=None if reference is None else decoder(seed=reference),
        ).train(PreferenceStream(sets / "pairs", sequence_length=64, batch_size=4))

    train(1)
    with pytest.raises(CheckpointError, match=r"whose reference was \"\w+\" and is now"):
        train(2, reference=1)
    with pytest.raises(CheckpointError, match=r"whose policy was \"\w+\" and is now"):
        train(2, start=1, reference=0)
    assert train(2, reference=0).step == 2


def test_a_reward_model_is_trained_saved_and_used_as_a_reward(sets: Path, tmp_path: Path) -> None:
    """The saved model scores like the trained one."""
    result = RewardTrainer(**quiet(tmp_path, 15), learning_rate=3e-3).train(
        PreferenceStream(sets / "pairs", sequence_length=64, batch_size=8),
        held_out=lambda: PreferenceStream(
            sets / "pairs", sequence_length=64, batch_size=4, split="held_out", epochs=1
        ),
    )
    assert isinstance(result.model, RewardModel)
    assert result.first["held_out_loss"] == pytest.approx(float(np.log(2)), abs=1e-5)
    assert result.last["held_out_accuracy"] >= 0.9
    result.model.save(tmp_path / "model")
    loaded = RewardModel.load(tmp_path / "model")
    samples = [
        Sample(prompt="", response="", prompt_tokens=(1, 2), response_tokens=tokens)
        for tokens in ((3, 4, 5), (6,))
    ]
    scores = ModuleReward(loaded)(samples)
    torch.testing.assert_close(scores, ModuleReward(result.model)(samples))
    with torch.no_grad():
        single = loaded(torch.tensor([[1, 2, 6]]))
    torch.testing.assert_close(scores[1:], single)
    with pytest.raises(ModelError, match="is not a reward model"):
        RewardModel.load(sets / "model")


def test_scores_of_pairs_do_not_depend_on_the_microbatch(sets: Path, tmp_path: Path) -> None:
    """Compares losses at each step, and the held-out margin with the saved model's.

    Float32 sums in another order: 1e-5 relative, 1e-4 after three updates.
    """

    def pairs() -> PreferenceStream:
        return PreferenceStream(
            sets / "pairs", sequence_length=64, batch_size=4, split="held_out", epochs=1
        )

    losses = []
    for size in (None, 2):
        settings = {**quiet(tmp_path / str(size), 3), "microbatch_size": size}
        result = RewardTrainer(**settings, learning_rate=3e-3).train(
            PreferenceStream(sets / "pairs", sequence_length=64, batch_size=4), held_out=pairs
        )
        losses.append([event["loss"] for event in events(tmp_path / str(size), "step")])
        reward_model, margins = result.model, []
        assert isinstance(reward_model, RewardModel)
        for batch in pairs():
            rows = {name: torch.as_tensor(value) for name, value in batch.items()}
            with torch.no_grad():
                scores = reward_model(rows["tokens"], (rows["documents"] == 0).sum(1)).view(-1, 2)
            has_targets = (rows["targets"] >= 0).any(1).view(-1, 2).all(1)
            margins += (scores[:, 0] - scores[:, 1])[has_targets].tolist()
        assert result.last["held_out_margin"] == pytest.approx(float(np.mean(margins)), rel=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def run_file(sets: Path, folder: Path, command: str, **overrides: Any) -> Path:
    """Write a run file for one of the three trainers."""
    settings: dict[str, Any] = {
        "model": str(sets / "model"),
        "sequence_length": 64,
        "batch_size": 4,
        "steps": 6,
        "checkpoint_every": 1,
        "keep_checkpoints": 10,
        "learning_rate": 1e-3,
        "output_dir": str(folder / command),
        "progress": False,
        **overrides,
    }
    tables = {k: v for k, v in settings.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in settings.items() if k not in tables]
    data = {"copy": str(sets / "copy"), "reverse": str(sets / "reverse")}
    if command == "sft":
        tables["dataset"] = data
    else:
        lines.append(f"dataset = {json.dumps(str(sets / 'pairs'))}")
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path = folder / f"{command}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"tasks": {"warmup_steps": 1}},
    "dpo": {"lora": {"rank": 4}},
    "reward": {},
}


@pytest.mark.parametrize("command", ["dpo", "reward"])
def test_conversations_are_rejected_by_pair_trainers(
    sets: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the folder and the remedy; reward models reject layouts too."""
    run = run_file(sets, tmp_path, command)
    assert main([command, str(run), "--set", f"dataset='{sets / 'copy'}'"]) == 2
    assert "copy has conversations instead of preference pairs; build" in capsys.readouterr().err
    if command == "reward":
        assert main([command, str(run), "--set", "layout.data=2"]) == 2
        assert "remove layout and lora" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sft", "dpo", "reward"])
def test_kill_9_then_the_same_command_ends_in_the_same_bits(
    sets: Path, tmp_path: Path, command: str
) -> None:
    """Trained model and last checkpoint match an uninterrupted run."""
    (tmp_path / "reference").mkdir()
    reference = run_file(sets, tmp_path / "reference", command, **SETTINGS[command])
    assert main([command, str(reference)]) == 0
    run = run_file(sets, tmp_path, command, **SETTINGS[command])
    process = Command(["-m", "ms_align", command, str(run)], imports=("ms_align.trainers.sft",))
    manifest = tmp_path / command / "checkpoints" / "step-00000003" / "manifest.json"
    start = time.monotonic()
    while process.poll() is None and not manifest.exists() and time.monotonic() - start < 240:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert manifest.exists()
    assert not (tmp_path / command / "model").exists()
    assert main([command, str(run)]) == 0
    assert events(tmp_path / command, "resume")[-1]["step"] >= 3
    if command != "reward":
        samples = events(tmp_path / command, "sample")
        assert samples[0]["prompt"].endswith("<assistant>")
        assert len(samples) >= 6
    weights = "model/body/model.safetensors" if command == "reward" else "model/model.safetensors"
    for name in (weights, "checkpoints/step-00000006/rank-00000.safetensors"):
        actual, expected = (
            load_file(folder / command / name) for folder in (tmp_path, tmp_path / "reference")
        )
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in actual)
    before = load_file(sets / "model" / "model.safetensors")
    after = load_file(tmp_path / command / weights)
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert (tmp_path / command / "model" / "tokenizer.json").is_file()
    assert load_model((tmp_path / command / weights).parent) is not None


def test_a_model_without_cache_trains_without_samples() -> None:
    """A note gives the reason."""
    notes: list[str] = []
    log = RunLog(event=lambda kind, fields: None, note=notes.append)
    SamplePrompts(prompts=[[1, 2]]).log(LocalEngine(NoCache()), log)
    (line,) = notes
    assert line.startswith("no samples: NoCache does not support a KV cache")


class NoCache(torch.nn.Module):
    """Model without a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) to (B, S, 8)."""
        hidden: torch.Tensor = self.embed(tokens)
        return hidden


def test_epochs_are_counted_in_rows(sets: Path, tmp_path: Path) -> None:
    """Two epochs end when every sample was used twice; another launch has nothing to do."""
    run = run_file(sets, tmp_path, "sft", steps=None, epochs=2)
    run.write_text(run.read_text().replace("steps = null\n", ""))
    assert main(["sft", str(run)]) == 0
    expected = sum(1 for _ in instructions(sets, sequence_length=64, epochs=2))
    assert len(events(tmp_path / "sft", "step")) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["model=nowhere"], "nowhere has no config.json"),
        (["dataset=nowhere"], "dataset must exist: 'nowhere' does not exist"),
        (["sequence_length=100000"], "longer than the model's context"),
        (["sequence_length=4"], "has a target within 4 tokens"),
        (["step=5"], "unknown key 'step'; did you mean 'steps'"),
        (["epochs=2"], "either steps or epochs must be set, got both"),
        (["lora.target_modules=['nothing']"], "no linear layer matches"),
        (["tasks.signal='mood'"], "signal is 'mood'; known: given, loss, progress"),
        (["batch_size=0"], "at least 1"),
        (["layout.dat=2"], "layout has no axis 'dat'; did you mean 'data'?"),
        (["layout=3"], "layout must be a table such as { data = 2, tensor = 2 }, got 3"),
        (["lora=3"], "lora must be a table"),
        (["lora.target_modules='('"], "target_modules must be names or a regular expression, got"),
        (["lora.target_modules=5"], "must be layer names or a regular expression, got 5"),
        (["dataset=3"], "dataset must be a path, got 3"),
        (["dataset={a=1}"], "dataset must be a path, got 1"),
        (["weights=x"], "weights must be a table of numbers of at least 0, got 'x'"),
        (["task_weights=3"], "task_weights must be a table of numbers of at least 0, got 3"),
        (["task_weights={a='x'}"], "task_weights must be a table of numbers"),
        (["task_weights={a=-1}"], "task_weights must be a table of numbers"),
        (["tasks={signal='given', given=5}"], "given must be a table of numbers"),
        (["betas=5"], "betas must be two numbers from 0 to below 1, got 5"),
        (["output_dir=5"], "output_dir must be a path, got 5"),
        (["data='x'"], "unknown key 'data'; did you mean 'dataset'?"),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(
    sets: Path,
    tmp_path: Path,
    change: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Problem, location and remedy; nothing is written."""
    run = run_file(sets, tmp_path, "sft")
    overrides = [part for assignment in change for part in ("--set", assignment)]
    assert main(["sft", str(run), *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "sft" / "checkpoints").exists()


def test_a_finished_run_does_nothing_and_fewer_steps_are_rejected(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command returns at once with exit code 0 and one line."""
    run = run_file(sets, tmp_path, "sft", progress=True, steps=3)
    assert main(["sft", str(run)]) == 0
    stat_before = (tmp_path / "sft" / "model" / "model.safetensors").stat()
    capsys.readouterr()
    assert main(["sft", str(run)]) == 0
    assert "finished: all 3 steps in" in capsys.readouterr().out
    assert (tmp_path / "sft" / "model" / "model.safetensors").stat() == stat_before
    assert main(["sft", str(run), "--set", "steps=2"]) == 2
    assert "raise steps or set another output_dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "overrides", "written"),
    [
        ("sft", {}, "model/model.safetensors"),
        ("dpo", {"lora": {"rank": 4}, "merge": False}, "adapter/adapter_model.safetensors"),
        ("reward", {}, "model/reward_head.safetensors"),
    ],
)
def test_a_run_killed_before_writing_its_model_writes_it_on_resume(
    sets: Path, tmp_path: Path, command: str, overrides: dict[str, Any], written: str
) -> None:
    """Bit for bit and without another update; the next launch does nothing."""
    run = run_file(sets, tmp_path, command, **{"steps": 2, **overrides})
    assert main([command, str(run)]) == 0
    file = tmp_path / command / written
    before, step_count = file.read_bytes(), len(events(tmp_path / command, "step"))
    file.unlink()
    if command != "reward":
        shutil.rmtree(file.parent)
    assert main([command, str(run)]) == 0
    assert file.read_bytes() == before
    assert len(events(tmp_path / command, "step")) == step_count
    assert main([command, str(run)]) == 0
    assert len(events(tmp_path / command, "step")) == step_count


class Constant:
    """Stream that repeats one batch."""

    vocabulary_size = 257

    def __init__(self, batch: dict[str, Any], times: int = 10) -> None:
        self.batch, self.remaining = batch, times

    def __next__(self) -> dict[str, Any]:
        if not self.remaining:
            raise StopIteration
        self.remaining -= 1
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches left."""
        return {"left": self.remaining}

    def load_state_dict(self, state: Any) -> None:
        """Restore the number of batches left."""
        self.remaining = state["left"]


def test_an_unwritable_folder_is_reported(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line: problem, reason and remedy."""
    (tmp_path / "file").write_text("")
    run = run_file(sets, tmp_path, "sft", output_dir=str(tmp_path / "file" / "sft"))
    assert main(["sft", str(run)]) == 2
    assert "is not a folder; use another path" in capsys.readouterr().err


def test_silent_failures_are_errors(sets: Path, tmp_path: Path) -> None:
    """An empty mask, a stream that ends early, a tokenizer with more tokens than the model."""
    empty = {
        "tokens": np.zeros((2, 8), np.int64),
        "targets": np.full((2, 8), -100, np.int64),
    }
    with pytest.raises(NothingToLearnError, match="no target"):
        SFTTrainer(**quiet(tmp_path / "a", 2)).train(Constant(empty))
    pairs = {key: value.repeat(2, axis=0) for key, value in empty.items()}
    with pytest.raises(NothingToLearnError, match="no pair"):
        DPOTrainer(**quiet(tmp_path / "b", 2)).train(Constant(pairs))
    full = {**empty, "targets": np.zeros((2, 8), np.int64)}
    with pytest.raises(DataError, match="ended before"):
        SFTTrainer(**quiet(tmp_path / "c", 2)).train(Constant(full, 1))
    stream = Constant(full)
    stream.vocabulary_size = 300
    with pytest.raises(ModelError, match="tokenizer and model disagree"):
        SFTTrainer(**quiet(tmp_path / "d", 2)).train(stream)
