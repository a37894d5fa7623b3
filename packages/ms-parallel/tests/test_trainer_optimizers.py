"""`trainer_optimizers` under transformers' own Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ms_parallel import AdamWConfig, MuonConfig
from ms_parallel.errors import ConfigError
from ms_parallel.huggingface import trainer_optimizers
from ms_parallel.optim.optimizer import learning_rate

pytest.importorskip("accelerate")  # Trainer needs it
STEPS = 8
CONFIG = AdamWConfig(
    learning_rate=1e-2, warmup_steps=2, decay="cosine", decay_steps=STEPS, weight_decay=0.1
)


def model() -> LlamaForCausalLM:
    """A small Llama, the same at each call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )


def rows() -> list[dict[str, Any]]:
    """Random rows."""
    tokens = torch.randint(64, (2 * STEPS, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(optimizer: Any, output: Path, *, steps: int = STEPS, resume: bool = False) -> Any:
    """Train with the real Trainer; return the model, losses and learning rates."""
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        max_grad_norm=1.0,
    )
    network, logs = model(), {}

    class Log(TrainerCallback):
        """Keeps what Trainer logs, and stops it early."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Store the loss and the learning rate of a step."""
            if "loss" in logs:
                entries[state.global_step] = (logs["loss"], logs["learning_rate"])

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Stop after `steps`."""
            control.should_training_stop = state.global_step >= steps

    entries: dict[int, tuple[float, float]] = logs
    pair = trainer_optimizers(network, optimizer, total_steps=STEPS)
    trainer = Trainer(
        network,
        arguments,
        train_dataset=rows(),
        optimizers=pair,
        callbacks=[Log()],  # type: ignore[arg-type]
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return network, entries


def test_trainer_takes_the_steps_of_torchs_adamw_with_our_schedule(tmp_path: Path) -> None:
    """A plain loop with torch's AdamW, two groups and our learning rate as reference."""
    network, logs = train(CONFIG, tmp_path / "run")
    reference = model()
    matrices = [p for p in reference.parameters() if p.ndim > 1]
    vectors = [p for p in reference.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=CONFIG.betas, eps=CONFIG.eps)
    data = rows()
    for step in range(STEPS):
        batch = torch.stack([row["input_ids"] for row in data[2 * step : 2 * step + 2]])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, CONFIG)
        loss = reference(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert logs[step + 1][0] == pytest.approx(loss.item(), abs=1e-4)
        # Trainer logs the rate after the step's scheduler update.
        assert logs[step + 1][1] in (
            pytest.approx(learning_rate(step, CONFIG)),
            pytest.approx(learning_rate(step + 1, CONFIG)),
        )
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(network.get_parameter(name), parameter, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "optimizer", [CONFIG, MuonConfig(learning_rate=1e-2)], ids=["AdamW", "Muon"]
)
def test_a_resumed_trainer_restores_our_optimizer(tmp_path: Path, optimizer: Any) -> None:
    """8 steps, and 4 steps and a resume, end with the same weights."""
    whole, _ = train(optimizer, tmp_path / "one")
    train(optimizer, tmp_path / "two", steps=4)
    resumed, logs = train(optimizer, tmp_path / "two", resume=True)
    assert min(logs) == 5
    for name, parameter in whole.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name


def test_names_settings_and_frozen_models() -> None:
    """Optimizers by name; a wrong setting or a frozen model is refused."""
    network = model()
    optimizer, schedule = trainer_optimizers(
        network, "adafactor", total_steps=10, learning_rate=2e-3, warmup_steps=2
    )
    assert schedule.get_last_lr() == [1e-3]
    assert len(optimizer.param_groups[0]["params"]) == len(list(network.parameters()))
    with pytest.raises(ConfigError, match=r"did you mean|unknown"):
        trainer_optimizers(network, "adamww", total_steps=10)
    with pytest.raises(ConfigError, match="set them there"):
        trainer_optimizers(network, CONFIG, total_steps=10, learning_rate=1.0)
    network.requires_grad_(False)
    with pytest.raises(ConfigError, match="trainable parameters"):
        trainer_optimizers(network, "adamw", total_steps=10)
