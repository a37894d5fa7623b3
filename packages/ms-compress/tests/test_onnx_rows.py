"""Rows of different lengths in one batch of onnxruntime, and files that it can be given at all."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from folders import write_run
from models import decoder, qwen2, qwen3, tokens
from torch import Tensor, nn

from ms_compress import ExportError, export, qat
from ms_compress.cli import main
from ms_compress.models.logits import model_logits
from ms_parallel.models import Decoder
from ms_parallel.weights import initialize

FILLED, LENGTH = 7, 20


class Session:
    """A folder in onnxruntime, as a user's own loop calls it."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(folder / "model.onnx")
        self.caches = [each for each in self.session.get_inputs() if "past" in each.name]

    def __call__(
        self, ids: Tensor, mask: Tensor, past: list[np.ndarray] | None = None
    ) -> tuple[Tensor, list[np.ndarray]]:
        """Logits, and the keys and values so far."""
        empty = [np.zeros((len(ids), e.shape[1], 0, e.shape[3]), np.float32) for e in self.caches]
        feed = {e.name: a for e, a in zip(self.caches, past or empty, strict=True)}
        feed |= {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        logits, *now = self.session.run(None, feed)
        return torch.from_numpy(logits), now


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "model", [decoder, qwen3, lambda: qwen2("full_attention", "sliding_attention")]
)
def test_a_filled_row_gives_the_logits_of_the_row_alone(
    model: Callable[[], nn.Module], side: str, tmp_path: Path
) -> None:
    """In a prompt and in the step after it: at most 1e-5 off, as of rows that are not filled.

    Windows count filled places, so a row filled on the right is continued in whole layers alone.
    """
    prepared = qat(model(), "ort.matmulnbits")
    session = Session(export(prepared, tmp_path / "out"))
    text, after = tokens(2, LENGTH), torch.tensor([[3], [5]])
    short, none = text[1:, : LENGTH - FILLED], torch.zeros(1, FILLED, dtype=torch.int64)
    order = slice(None, None, 1 if side == "left" else -1)
    row = torch.cat((none, short)[order], dim=1)
    said = torch.cat((none, torch.ones_like(short))[order], dim=1)
    mask = torch.cat((torch.ones(1, LENGTH, dtype=torch.int64), said))
    logits, past = session(torch.cat((text[:1], row)), mask)
    counted = logits[1:, FILLED:] if side == "left" else logits[1:, :-FILLED]
    assert apart(logits[:1], model_logits(prepared, text[:1])) <= 1e-5
    assert apart(counted, model_logits(prepared, short)) <= 1e-5
    if side == "right" and hasattr(prepared.config, "layer_types"):
        return
    logits, _ = session(after, torch.cat((mask, torch.ones_like(after)), dim=1), past)
    for number, before in enumerate((text[:1], short)):
        whole = torch.cat((before, after[number : number + 1]), dim=1)
        expected = model_logits(prepared, whole)[:, -1:]
        assert apart(logits[number : number + 1], expected) <= 1e-5


def test_the_file_says_how_rows_are_filled_up(tmp_path: Path) -> None:
    """Whoever has the file alone can read it there."""
    whole = export(qat(decoder(1), "ort.matmulnbits"), tmp_path / "whole")
    slides = export(qat(qwen2("sliding_attention"), "ort.matmulnbits"), tmp_path / "slides")
    said = [
        {each.key: each.value for each in onnx.load(folder / "model.onnx").metadata_props}
        for folder in (whole, slides)
    ]
    assert "on the left or on the right" in said[0]["padding"]
    assert "padded on the right cannot be continued" in said[1]["padding"]


@pytest.mark.parametrize("width", [4, 8, 24])
def test_heads_that_onnxruntime_does_not_take_are_refused_before(
    width: int, tmp_path: Path
) -> None:
    """It would read the file, and refuse the first text."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": width}
    model = Decoder(attrs.evolve(decoder().config, **sizes))
    initialize(model, 0)
    with pytest.raises(ExportError, match=f"for onnxruntime's GroupQueryAttention, got {width}"):
        export(qat(model, "ort.matmulnbits"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_its_runtime_refuses_is_never_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody asked to verify it: what is written is opened once, and run."""
    from ms_compress.targets.ort import graph

    monkeypatch.setattr(graph, "CONTRIB", "com.nobody")
    with pytest.raises(ExportError, match="onnxruntime cannot read it"):
        export(qat(decoder(1), "ort.matmulnbits"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", [0o022, 0o077])
@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("quantize", "scheme=ort.matmulnbits"),
        ("quantize", "scheme=ct.int4_g32"),
        ("qat", "scheme=ct.int4_g32"),
        ("prune", "pattern=2:4"),
    ],
)
def test_every_file_has_the_mode_that_the_umask_leaves(
    mask: int, command: str, setting: str, tmp_path: Path
) -> None:
    """Libraries that write through temporary files make them for their owner alone."""
    file = write_run(tmp_path)
    before = os.umask(mask)
    try:
        assert main([command, str(file), "--set", setting]) == 0
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~mask


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference."""
    return float((found - expected).abs().max())
