"""KTO, APO-zero and BCO on labeled responses: formulas, learning, layouts and exact resume."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Command, run_command
from safetensors.torch import load_file

from ms_align import ConfigError, DataError, KTOTrainer
from ms_align.cli import main
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.losses.kto import KTOLoss, row_logprobs
from ms_align.losses.unpaired import LOSSES
from ms_data import UnpairedStream

from .small_models import decoder


def stream(sets: Path, **overrides: Any) -> UnpairedStream:
    """Open the pairs, unpaired."""
    return UnpairedStream(sets / "pairs", **{"sequence_length": 64, "batch_size": 8, **overrides})


def trainer(folder: Path, **overrides: Any) -> KTOTrainer:
    """Build a trainer of a small model without progress output."""
    settings = {"model": decoder(), "steps": 6, "output_dir": folder, "progress": False}
    return KTOTrainer(**{**settings, **overrides})


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def run_file(sets: Path, folder: Path, **overrides: Any) -> Path:
    """Write a run file of `ms-align kto`."""
    settings = {
        "model": str(sets / "model"),
        "dataset": str(sets / "pairs"),
        "sequence_length": 64,
        "batch_size": 4,
        "steps": 6,
        "checkpoint_every": 1,
        "keep_checkpoints": 10,
        "learning_rate": 1e-3,
        "output_dir": str(folder / "kto"),
        "progress": False,
        **overrides,
    }
    path = folder / "kto.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    return path


def plain_losses(name: str, beta: float, log_ratio: float, label: bool, baseline: float) -> float:
    """Compute a loss of one response in float64 as in TRL's trainers, case by case."""
    reward = torch.tensor(beta * log_ratio, dtype=torch.float64)
    if name == "kto":
        difference = reward - beta * baseline
        return float(1 - torch.sigmoid(difference if label else -difference))
    if name == "apo_zero_unpaired":
        return float(1 - torch.sigmoid(reward) if label else torch.sigmoid(reward))
    shifted = reward - baseline
    return float(-torch.nn.functional.logsigmoid(shifted if label else -shifted))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_the_formulas_of_each_label(name: str) -> None:
    """Float32 against float64: 1e-6 relative, as no terms cancel."""
    log_ratios = torch.tensor([-30.0, -2.0, -0.1, 0.0, 0.3, 4.0, 25.0, 1.0])
    labels = torch.tensor([1.0, 0.0] * 4)
    loss = KTOLoss(loss_type=name, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    batch = {
        "label": labels,
        "reference_logprobs": torch.full((8,), -7.0),
        "baseline": torch.full((8,), 0.7),
    }
    losses = loss.losses(loss.rows(log_ratios - 7.0, batch))
    for value, log_ratio, label in zip(losses, log_ratios, labels, strict=True):
        weight = 1.5 if label else 0.5
        expected = weight * plain_losses(name, 0.3, float(log_ratio), bool(label), 0.7)
        assert float(value) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_desirable_responses_gain_probability(sets: Path, tmp_path: Path, name: str) -> None:
    """Held-out loss falls and the margin grows from 0."""
    result = trainer(tmp_path, steps=15, loss_type=name, learning_rate=1e-3).train(
        stream(sets), held_out=lambda: stream(sets, split="held_out", epochs=1)
    )
    assert result.first["held_out_margin"] == pytest.approx(0, abs=1e-5)
    assert result.last["held_out_margin"] > 0.5
    assert result.last["held_out_loss"] < result.first["held_out_loss"]


def test_the_kl_is_the_mean_log_ratio_of_mismatched_responses(sets: Path, tmp_path: Path) -> None:
    """It covers the global batch and is at least 0; a distant reference gives a large one."""
    batch = {name: torch.as_tensor(value) for name, value in next(stream(sets)).items()}
    rows = {name: batch[f"kl_{name}"] for name in ("tokens", "targets", "positions", "documents")}
    policy, reference = (LocalEngine(decoder(seed=seed)) for seed in (0, 1))
    log_ratios = policy.evaluate(rows, row_logprobs) - reference.evaluate(rows, row_logprobs)
    for model, other, sign in ((0, 1, 1), (1, 0, -1)):
        folder = tmp_path / str(model)
        trainer(folder, model=decoder(seed=model), reference_model=decoder(seed=other)).train(
            stream(sets)
        )
        expected = max(0.0, sign * float(log_ratios.mean()))
        assert events(folder, "step")[0]["kl"] == pytest.approx(expected, rel=1e-5)
    kls = [events(tmp_path / str(model), "step")[0]["kl"] for model in (0, 1)]
    assert min(kls) == 0.0 < max(kls)


def test_the_baseline_of_bco_is_the_mean_reward_of_the_run(sets: Path, tmp_path: Path) -> None:
    """A learning rate of 0 keeps the rewards constant, so they can be recomputed."""
    trainer(
        tmp_path, reference_model=decoder(seed=1), loss_type="bco", learning_rate=0.0, steps=3
    ).train(stream(sets))
    policy, reference = (LocalEngine(decoder(seed=seed)) for seed in (0, 1))
    batches, rewards = stream(sets), torch.zeros(0)
    for step in events(tmp_path, "step"):
        rows = {name: torch.as_tensor(value) for name, value in next(batches).items()}
        log_ratios = policy.evaluate(rows, row_logprobs) - reference.evaluate(rows, row_logprobs)
        rewards = torch.cat((rewards, 0.1 * log_ratios))
        assert step["reward_mean"] == pytest.approx(float(rewards.mean()), rel=1e-5)


def test_the_weights_of_labels_scale_gradients_but_not_the_divisor(sets: Path) -> None:
    """With an undesirable weight of 0, undesirable rows only count in the divisor."""
    batch = {name: torch.as_tensor(value) for name, value in next(stream(sets)).items()}
    batch = {name: value for name, value in batch.items() if not name.startswith("kl_")}
    reference = LocalEngine(decoder(seed=1))
    batch["reference_logprobs"] = reference.evaluate(batch, row_logprobs)
    desirable = {name: value[batch["label"] > 0] for name, value in batch.items()}
    assert 0 < len(desirable["label"]) < 8
    norms = []
    for rows, loss in ((batch, KTOLoss(undesirable_weight=0.0)), (desirable, KTOLoss())):
        engine = LocalEngine(decoder(), OptimizerOptions(max_grad_norm=None))
        norms.append(engine.step(rows, loss).grad_norm * loss.weight(rows))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.fixture(scope="module")
def one_process(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the runs of one process, by loss."""
    folder = tmp_path_factory.mktemp("kto")
    for name in ("kto", "bco"):
        (folder / name).mkdir()
        run = run_file(sets, folder / name, loss_type=name, steps=3, eval_every=3, beta=0.5)
        assert main(["kto", str(run)]) == 0
    return folder


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        *(("kto", "data"), ("kto", "pipeline")),
        pytest.param("kto", "tensor", marks=pytest.mark.slow),
        *(
            pytest.param("bco", axis, marks=pytest.mark.slow)
            for axis in ("data", "tensor", "pipeline")
        ),
    ],
)
def test_losses_equal_those_of_one_process(
    sets: Path, tmp_path: Path, one_process: Path, axis: str, name: str
) -> None:
    """Losses, KL, mean reward and held-out metrics; with microbatches of one row.

    Float32 sums in another order: 1e-5; gradient norms after Adam's first steps 1e-4.
    """
    run = run_file(sets, tmp_path, loss_type=name, steps=3, eval_every=3, beta=0.5)
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*runner, "-m", "ms_align", "kto", str(run), f"layout.{axis}=2", "microbatch_size=1"]
    process = run_command(words, imports=("ms_align.trainers.kto", "ms_parallel.engine.engine"))
    assert process.returncode == 0, process.stderr[-3000:]
    for kind, count in (("step", 3), ("evaluate", 2)):
        pairs = list(
            zip(
                events(tmp_path / "kto", kind),
                events(one_process / name / "kto", kind),
                strict=True,
            )
        )
        assert len(pairs) == count
        for event, expected in pairs:
            names = {k for k in expected if k not in ("time", "kind", "tokens", "seconds")}
            names = {k for k in names if not k.startswith(("rate_", "tokens_"))}
            assert {"loss", "reward_chosen", "held_out_loss"} & names
            for key in names:
                tolerance = 1e-4 if key == "grad_norm" else 1e-5
                assert event[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance), key


@pytest.mark.parametrize("name", ["kto", "bco"])
def test_kill_9_then_the_same_command_ends_in_the_same_bits(
    sets: Path, tmp_path: Path, name: str
) -> None:
    """Model and last checkpoint match an undisturbed run, and so does the mean reward."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = run_file(sets, tmp_path / "undisturbed", loss_type=name)
    assert main(["kto", str(undisturbed)]) == 0
    run = run_file(sets, tmp_path, loss_type=name)
    process = Command(["-m", "ms_align", "kto", str(run)], imports=("ms_align.trainers.kto",))
    checkpoint = tmp_path / "kto" / "checkpoints" / "step-00000003" / "manifest.json"
    deadline = time.monotonic() + 240
    while process.poll() is None and not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.exists()
    assert not (tmp_path / "kto" / "model").exists()
    assert main(["kto", str(run)]) == 0
    assert events(tmp_path / "kto", "resume")[-1]["step"] >= 3
    folders = (tmp_path / "kto", tmp_path / "undisturbed" / "kto")
    for file in ("model/model.safetensors", "checkpoints/step-00000006/rank-00000.safetensors"):
        resumed, expected = (load_file(folder / file) for folder in folders)
        assert resumed.keys() == expected.keys()
        assert all(torch.equal(resumed[key], expected[key]) for key in expected)
    last = [events(folder, "step")[-1] for folder in folders]
    names = ("loss", "kl" if name == "kto" else "reward_mean")
    assert [last[0][key] for key in names] == [last[1][key] for key in names]


def test_invalid_data_and_settings_are_rejected(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in one line with the remedy."""
    run = run_file(sets, tmp_path)
    for change, message in (
        (f"dataset='{sets / 'copy'}'", "copy has conversations without labels; build it with"),
        ("batch_size=1", "batch_size must be at least 2 for kto"),
        ("loss_type=ktoo", "did you mean 'kto'"),
        ("desirable_weight=-1", "desirable_weight must be"),
    ):
        assert main(["kto", str(run), "--set", change]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(DataError, match="mismatched=True"):
        trainer(tmp_path / "a").train(stream(sets, mismatched=False))
    with pytest.raises(ConfigError, match="at least 2"):
        trainer(tmp_path / "b", batch_size=1)
    without_kl = trainer(tmp_path / "c", loss_type="apo_zero_unpaired", steps=1)
    assert without_kl.train(stream(sets, mismatched=False)).finished
