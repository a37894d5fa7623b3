"""`TrainerDataset` under transformers' own Trainer: rows, boundaries, losses and resume."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ms_data
from ms_data.errors import SettingError

pytest.importorskip("accelerate")  # Trainer needs it
LENGTH = 24


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of short documents."""
    root = tmp_path_factory.mktemp("data")
    (root / "corpus").mkdir()
    for number in range(40):
        text = " ".join(f"word{(number * 7 + k) % 23}" for k in range(3 + number % 9))
        (root / "corpus" / f"{number}.txt").write_text(text)
    ms_data.train_tokenizer(root / "corpus", vocab_size=300, out=root / "tokenizer.json")
    ms_data.build(root / "corpus", tokenizer=root / "tokenizer.json", out=root / "shards")
    return root / "shards"


def dataset(shards: Path, **settings: Any) -> ms_data.TrainerDataset:
    """Dataset of the shards."""
    return ms_data.TrainerDataset(shards, sequence_length=LENGTH, seed=5, **settings)


def model() -> LlamaForCausalLM:
    """A small Llama, the same at each call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )


def test_rows_are_those_of_the_stream_in_every_epoch(shards: Path) -> None:
    """Tokens and boundaries of two epochs; a pickled copy, as for workers, has the same rows."""
    rows = dataset(shards)
    stream = ms_data.TokenStream(shards, sequence_length=LENGTH, batch_size=1, seed=5)
    assert len(rows) == stream.samples_per_epoch > 8
    for epoch in (0, 1):
        rows.set_epoch(epoch)
        copy = pickle.loads(pickle.dumps(rows))  # noqa: S301 - as for workers
        for number in range(len(rows)):
            expected, row = next(stream), rows[number]
            assert np.array_equal(row["input_ids"], expected["tokens"][0])
            assert np.array_equal(row["position_ids"], expected["positions"][0])
            # The stream's targets are shifted by one, and the last has no label in the row.
            assert np.array_equal(row["labels"][1:], expected["targets"][0][:-1])
            assert np.array_equal(copy[number]["input_ids"], row["input_ids"])
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_the_loss_of_a_packed_row_is_that_of_its_documents(shards: Path) -> None:
    """Transformers masks attention by the positions, as under Trainer (no cache)."""
    network = model().eval()
    rows = dataset(shards)
    richest = max(range(len(rows)), key=lambda n: (rows[n]["position_ids"] == 0).sum())
    row = {k: torch.as_tensor(v)[None] for k, v in rows[richest].items()}
    starts = (row["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    assert len(starts) > 2
    with torch.no_grad():
        packed = network(**row, use_cache=False).loss
        total, count = 0.0, 0
        for document in row["input_ids"][0].tensor_split(starts[1:]):
            if len(document) > 1:
                loss = network(document[None], labels=document[None], use_cache=False).loss
                total, count = total + loss.item() * (len(document) - 1), count + len(document) - 1
    assert packed.item() == pytest.approx(total / count, abs=1e-5)


class Losses(TrainerCallback):
    """Losses by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Store the loss of a step."""
        if logs and "loss" in logs:
            self.losses[state.global_step] = logs["loss"]


def train(shards: Path, output: Path, *, steps: int, resume: bool = False) -> tuple[Any, Any]:
    """Train with the real Trainer; return the losses and the final weights."""
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=16,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        seed=3,
    )
    network, losses = model(), Losses()

    class Stop(TrainerCallback):
        """Ends the training early."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Stop after `steps`."""
            control.should_training_stop = state.global_step >= steps

    rows = dataset(shards)
    trainer = Trainer(network, arguments, train_dataset=rows, callbacks=[losses, Stop()])
    trainer.train(resume_from_checkpoint=resume or None)
    return losses.losses, network.state_dict()


def test_a_resumed_trainer_has_the_same_losses_and_weights(shards: Path, tmp_path: Path) -> None:
    """16 steps over more than one epoch, and 4 steps and a resume, agree bit for bit."""
    assert len(dataset(shards)) < 2 * 16
    losses, weights = train(shards, tmp_path / "one", steps=16)
    train(shards, tmp_path / "two", steps=4)
    resumed, resumed_weights = train(shards, tmp_path / "two", steps=16, resume=True)
    assert len(losses) == 16
    assert resumed == {step: loss for step, loss in losses.items() if step > 4}
    assert all(torch.equal(weights[name], value) for name, value in resumed_weights.items())


def test_random_reads_warn_once_and_bad_settings_are_refused(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A random sampler is reported with its remedy."""
    rows = dataset(shards)
    for number in [*range(0, len(rows), 3)][::-1] * 8:
        rows[number]
    assert caplog.text.count("train_sampling_strategy='sequential'") == 1
    with pytest.raises(SettingError, match="sequence_length"):
        ms_data.TrainerDataset(shards, sequence_length=0)
    with pytest.raises(SettingError, match="no split 'test'"):
        dataset(shards, split="test")
