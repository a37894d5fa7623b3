"""A training that was stopped goes on to the weights of one that never was, bit for bit."""

import resource
from pathlib import Path

import attrs
import pytest
import torch
from models import decoder, llama, tokens
from torch import nn

from ms_compress import ConfigError, ExportError, GradualPruning, Tuning, qat, tune
from ms_compress.methods.pruning import keep_zeros, sparsity
from ms_compress.training.sealed_file import opened, write_sealed

HOW = Tuning(steps=7, batch_size=4, sequence_length=32, learning_rate=1e-2)


class StoppedError(Exception):
    """What stands for a kill."""


def train(model: nn.Module, kept: Path, *, stop: int | None = None, teacher: bool = False) -> None:
    """Pruned more and more while it is trained; stopped once so many steps are made."""
    schedule = GradualPruning(pattern="2:4", end=5, every=1)

    def on_loss(step: int, loss: float) -> None:
        if step == stop:
            raise StoppedError

    tune(
        model,
        tokens(16, 33),
        HOW,
        teacher=decoder() if teacher else None,
        before_step=lambda step: schedule.apply(model, step),
        after_step=lambda step: keep_zeros(model),
        on_loss=on_loss,
        checkpoint=kept,
        checkpoint_every_s=0.0,
    )


def prepared() -> nn.Module:
    """Learned scales, which the optimizer has a group of their own for."""
    return qat(decoder(), "gguf.q4_0", learned_scales=True)


@pytest.mark.parametrize("stop", [1, 2, 4, 7])
def test_stopped_at_any_step_it_ends_at_the_same_weights(stop: int, tmp_path: Path) -> None:
    """Moments, masks, the order of rows and the rate's place are all in the file."""
    whole, parts, kept = prepared(), prepared(), tmp_path / "out.training"
    train(whole, tmp_path / "other.training", teacher=True)
    with pytest.raises(StoppedError):
        train(parts, kept, stop=stop, teacher=True)
    again = prepared()
    train(again, kept, teacher=True)
    assert sparsity(again) == 0.5
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def dropping() -> nn.Module:
    """With dropout, which draws from torch's own generator."""
    model = llama()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return model


def test_dropout_goes_on_from_where_it_was_stopped(tmp_path: Path) -> None:
    """Whatever has been drawn since: the generator's state is in the file too."""
    whole, parts, again = dropping(), dropping(), dropping()
    torch.manual_seed(3)
    train(whole, tmp_path / "other.training")
    kept = tmp_path / "out.training"
    torch.manual_seed(3)
    with pytest.raises(StoppedError):
        train(parts, kept, stop=3)
    torch.manual_seed(4)
    train(again, kept)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    """Whole as it is: what versions before have written had no seal."""
    kept = tmp_path / "out.training"
    torch.save({"key": "", "model": {}}, kept)
    with pytest.raises(ConfigError, match=r"out\.training is damaged"):
        train(prepared(), kept)
    write_sealed(kept, b'{"format": "ms-compress-training/1"}', lambda file: None)
    with pytest.raises(ConfigError, match=r"is not a training checkpoint of this version"):
        train(prepared(), kept)


@pytest.fixture(scope="module")
def kept_state(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The state of a training that was stopped after three steps."""
    kept = tmp_path_factory.mktemp("kept") / "out.training"
    with pytest.raises(StoppedError):
        train(prepared(), kept, stop=3)
    return kept.read_bytes()


def test_a_flipped_bit_anywhere_in_the_state_is_refused(kept_state: bytes, tmp_path: Path) -> None:
    """In the digest, the header, the names and the numbers; no step is made of such a file."""
    kept, model, size = tmp_path / "out.training", prepared(), len(kept_state)
    ends = [*range(0, 160, 7), *range(size - 40, size, 3)]
    for place in [*ends, *range(160, size, size // 40)]:
        damaged = bytearray(kept_state)
        damaged[place] ^= 1 << place % 8
        kept.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"out\.training is damaged"):
            train(model, kept)


@pytest.mark.parametrize("cut", [0, 1, 100, 129, 130, 400, -1, -100])
def test_a_state_that_is_cut_off_is_refused(cut: int, kept_state: bytes, tmp_path: Path) -> None:
    """And so is one to which something was added."""
    kept = tmp_path / "out.training"
    for content in (kept_state[:cut], kept_state + b"\0"):
        kept.write_bytes(content)
        with pytest.raises(ConfigError, match=r"out\.training is damaged"):
            train(prepared(), kept)


def test_what_another_run_kept_is_refused(tmp_path: Path) -> None:
    """In a line that names what differs, with the remedy; the file stays."""
    kept = tmp_path / "out.training"
    with pytest.raises(StoppedError):
        train(prepared(), kept, stop=3)
    before = kept.read_bytes()
    other_settings = attrs.evolve(HOW, seed=1, learning_rate=1e-3)
    told = r"tuning\.learning_rate is 0\.001, was 0\.01, tuning\.seed is 1, was 0;"
    with pytest.raises(ConfigError, match=told):
        tune(prepared(), tokens(16, 33), other_settings, checkpoint=kept)
    other = qat(decoder(), "ort.matmulnbits", learned_scales=True)
    with pytest.raises(ConfigError, match="with other settings: layers changed;"):
        train(other, kept)
    with pytest.raises(ConfigError, match="with other settings: tokens changed;"):
        tune(prepared(), tokens(16, 33, seed=1), HOW, checkpoint=kept)
    with pytest.raises(ConfigError, match="with other settings: model is 'b', was not given;"):
        tune(prepared(), tokens(16, 33), HOW, checkpoint=kept, checkpoint_identity={"model": "'b'"})
    assert kept.read_bytes() == before


def test_a_last_state_that_the_disk_refuses_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One in between does; the disk may still take the smaller model that follows."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        kept = tmp_path / "out.training"
        tune(prepared(), tokens(16, 33), HOW, checkpoint=kept)
        with pytest.raises(ExportError, match=r"out\.training: File too large"):
            tune(prepared(), tokens(16, 33), HOW, checkpoint=kept, checkpoint_every_s=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator here")
def test_on_an_accelerator_a_stopped_training_goes_on(tmp_path: Path) -> None:
    """Tokens come from the CPU, and the accelerator's generator has a state of its own."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    kept = tmp_path / "out.training"
    with pytest.raises(StoppedError):
        train(dropping().to(device), kept, stop=3)
    with opened(kept) as (_, payload):
        held = torch.load(payload, weights_only=True)  # type: ignore[arg-type]
    assert {"cpu", device.type} == held["random"].keys()
    again = dropping().to(device)
    train(again, kept)
    assert all(bool(parameter.isfinite().all()) for parameter in again.parameters())
