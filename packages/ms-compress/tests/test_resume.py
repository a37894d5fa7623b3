"""An interrupted training resumes to bitwise the same weights as an uninterrupted one."""

import resource
from pathlib import Path

import attrs
import pytest
import torch
from models import decoder, llama, tokens
from torch import nn

from ms_compress import ConfigError, ExportError, GradualPruning, Tuning, qat, tune
from ms_compress.methods.pruning import keep_zeros, sparsity
from ms_compress.training.checkpoint import opened, write_sealed

TUNING = Tuning(steps=7, batch_size=4, sequence_length=32, learning_rate=1e-2)


class StoppedError(Exception):
    """Raised instead of a kill."""


def train(
    model: nn.Module, checkpoint: Path, *, stop: int | None = None, teacher: bool = False
) -> None:
    """Train with gradual pruning; interrupt after `stop` steps."""
    schedule = GradualPruning(pattern="2:4", end=5, every=1)

    def on_loss(step: int, loss: float) -> None:
        if step == stop:
            raise StoppedError

    tune(
        model,
        tokens(16, 33),
        TUNING,
        teacher=decoder() if teacher else None,
        before_step=lambda step: schedule.apply(model, step),
        after_step=lambda step: keep_zeros(model),
        on_loss=on_loss,
        checkpoint=checkpoint,
        checkpoint_every_s=0.0,
    )


def prepared() -> nn.Module:
    """Return a model with learned scales, which have their own optimizer group."""
    return qat(decoder(), "gguf.q4_0", learned_scales=True)


@pytest.mark.parametrize("stop", [1, 2, 4, 7])
def test_resuming_from_any_step_gives_the_same_weights(stop: int, tmp_path: Path) -> None:
    """The file has moments, masks, the order of rows and the learning-rate position."""
    uninterrupted, interrupted, checkpoint = prepared(), prepared(), tmp_path / "out.training"
    train(uninterrupted, tmp_path / "other.training", teacher=True)
    with pytest.raises(StoppedError):
        train(interrupted, checkpoint, stop=stop, teacher=True)
    resumed = prepared()
    train(resumed, checkpoint, teacher=True)
    assert sparsity(resumed) == 0.5
    for name, value in uninterrupted.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def with_dropout() -> nn.Module:
    """Return a model with dropout, which uses torch's random generator."""
    model = llama()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return model


def test_dropout_resumes_its_random_state(tmp_path: Path) -> None:
    """The generator's state is in the file, so numbers drawn in between do not matter."""
    uninterrupted, interrupted, resumed = with_dropout(), with_dropout(), with_dropout()
    torch.manual_seed(3)
    train(uninterrupted, tmp_path / "other.training")
    checkpoint = tmp_path / "out.training"
    torch.manual_seed(3)
    with pytest.raises(StoppedError):
        train(interrupted, checkpoint, stop=3)
    torch.manual_seed(4)
    train(resumed, checkpoint)
    for name, value in uninterrupted.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    """Earlier versions wrote files without a seal."""
    checkpoint = tmp_path / "out.training"
    torch.save({"key": "", "model": {}}, checkpoint)
    with pytest.raises(ConfigError, match=r"out\.training is damaged"):
        train(prepared(), checkpoint)
    write_sealed(checkpoint, b'{"format": "ms-compress-training/1"}', lambda file: None)
    with pytest.raises(ConfigError, match=r"is not a training checkpoint of this version"):
        train(prepared(), checkpoint)


@pytest.fixture(scope="module")
def saved_state(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The checkpoint of a training interrupted after three steps."""
    checkpoint = tmp_path_factory.mktemp("kept") / "out.training"
    with pytest.raises(StoppedError):
        train(prepared(), checkpoint, stop=3)
    return checkpoint.read_bytes()


def test_a_flipped_bit_anywhere_in_the_state_is_refused(saved_state: bytes, tmp_path: Path) -> None:
    """In the digest, header, names and numbers; no step runs from such a file."""
    checkpoint, model, size = tmp_path / "out.training", prepared(), len(saved_state)
    head_and_tail = [*range(0, 160, 7), *range(size - 40, size, 3)]
    for position in [*head_and_tail, *range(160, size, size // 40)]:
        damaged = bytearray(saved_state)
        damaged[position] ^= 1 << position % 8
        checkpoint.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"out\.training is damaged"):
            train(model, checkpoint)


@pytest.mark.parametrize("cut", [0, 1, 100, 129, 130, 400, -1, -100])
def test_a_truncated_or_extended_state_is_refused(
    cut: int, saved_state: bytes, tmp_path: Path
) -> None:
    """A file with an extra byte is refused too."""
    checkpoint = tmp_path / "out.training"
    for content in (saved_state[:cut], saved_state + b"\0"):
        checkpoint.write_bytes(content)
        with pytest.raises(ConfigError, match=r"out\.training is damaged"):
            train(prepared(), checkpoint)


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    """One line names the difference and the fix; the file stays."""
    checkpoint = tmp_path / "out.training"
    with pytest.raises(StoppedError):
        train(prepared(), checkpoint, stop=3)
    content = checkpoint.read_bytes()
    other_settings = attrs.evolve(TUNING, seed=1, learning_rate=1e-3)
    message = r"tuning\.learning_rate is 0\.001, was 0\.01, tuning\.seed is 1, was 0;"
    with pytest.raises(ConfigError, match=message):
        tune(prepared(), tokens(16, 33), other_settings, checkpoint=checkpoint)
    other_model = qat(decoder(), "ort.matmulnbits", learned_scales=True)
    with pytest.raises(ConfigError, match="with other settings: layers changed;"):
        train(other_model, checkpoint)
    with pytest.raises(ConfigError, match="with other settings: tokens changed;"):
        tune(prepared(), tokens(16, 33, seed=1), TUNING, checkpoint=checkpoint)
    with pytest.raises(ConfigError, match="with other settings: model is 'b', was not given;"):
        tune(
            prepared(),
            tokens(16, 33),
            TUNING,
            checkpoint=checkpoint,
            checkpoint_identity={"model": "'b'"},
        )
    assert checkpoint.read_bytes() == content


def test_a_full_disk_at_the_last_checkpoint_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At an earlier checkpoint it does; the disk may still have room for the smaller model."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        checkpoint = tmp_path / "out.training"
        tune(prepared(), tokens(16, 33), TUNING, checkpoint=checkpoint)
        with pytest.raises(ExportError, match=r"out\.training: File too large"):
            tune(prepared(), tokens(16, 33), TUNING, checkpoint=checkpoint, checkpoint_every_s=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_an_interrupted_training_resumes_on_an_accelerator(tmp_path: Path) -> None:
    """Tokens come from the CPU, and the accelerator has its own random generator."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    checkpoint = tmp_path / "out.training"
    with pytest.raises(StoppedError):
        train(with_dropout().to(device), checkpoint, stop=3)
    with opened(checkpoint) as (_, payload):
        stored = torch.load(payload, weights_only=True)  # type: ignore[arg-type]
    assert {"cpu", device.type} == stored["random"].keys()
    resumed = with_dropout().to(device)
    train(resumed, checkpoint)
    assert all(bool(parameter.isfinite().all()) for parameter in resumed.parameters())
