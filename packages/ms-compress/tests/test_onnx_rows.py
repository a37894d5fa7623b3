"""Padded rows in one onnxruntime batch, and files that onnxruntime accepts."""

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

PADDING, LENGTH = 7, 20


class Session:
    """A folder in onnxruntime, called like in a user's own loop."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(folder / "model.onnx")
        self.caches = [
            cache_input for cache_input in self.session.get_inputs() if "past" in cache_input.name
        ]

    def __call__(
        self, ids: Tensor, mask: Tensor, past: list[np.ndarray] | None = None
    ) -> tuple[Tensor, list[np.ndarray]]:
        """Return logits, and the keys and values so far."""
        empty = [np.zeros((len(ids), e.shape[1], 0, e.shape[3]), np.float32) for e in self.caches]
        feed = {e.name: a for e, a in zip(self.caches, past or empty, strict=True)}
        feed |= {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        logits, *present = self.session.run(None, feed)
        return torch.from_numpy(logits), present


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "model", [decoder, qwen3, lambda: qwen2("full_attention", "sliding_attention")]
)
def test_a_padded_row_gives_the_logits_of_the_row_alone(
    model: Callable[[], nn.Module], side: str, tmp_path: Path
) -> None:
    """In the prompt and the following step: at most 1e-5 off, as for unpadded rows.

    Windows count padding, so a row padded on the right can only be continued without windows.
    """
    prepared = qat(model(), "ort.matmulnbits")
    session = Session(export(prepared, tmp_path / "out"))
    text, next_tokens = tokens(2, LENGTH), torch.tensor([[3], [5]])
    short, padding = text[1:, : LENGTH - PADDING], torch.zeros(1, PADDING, dtype=torch.int64)
    order = slice(None, None, 1 if side == "left" else -1)
    row = torch.cat((padding, short)[order], dim=1)
    row_mask = torch.cat((padding, torch.ones_like(short))[order], dim=1)
    mask = torch.cat((torch.ones(1, LENGTH, dtype=torch.int64), row_mask))
    logits, past = session(torch.cat((text[:1], row)), mask)
    row_logits = logits[1:, PADDING:] if side == "left" else logits[1:, :-PADDING]
    assert max_difference(logits[:1], model_logits(prepared, text[:1])) <= 1e-5
    assert max_difference(row_logits, model_logits(prepared, short)) <= 1e-5
    if side == "right" and hasattr(prepared.config, "layer_types"):
        return
    logits, _ = session(next_tokens, torch.cat((mask, torch.ones_like(next_tokens)), dim=1), past)
    for number, prompt in enumerate((text[:1], short)):
        continued = torch.cat((prompt, next_tokens[number : number + 1]), dim=1)
        expected = model_logits(prepared, continued)[:, -1:]
        assert max_difference(logits[number : number + 1], expected) <= 1e-5


def test_the_file_documents_its_padding(tmp_path: Path) -> None:
    """In the metadata, for users who have only the file."""
    without_window = export(qat(decoder(1), "ort.matmulnbits"), tmp_path / "whole")
    with_window = export(qat(qwen2("sliding_attention"), "ort.matmulnbits"), tmp_path / "slides")
    metadata = [
        {prop.key: prop.value for prop in onnx.load(folder / "model.onnx").metadata_props}
        for folder in (without_window, with_window)
    ]
    assert "on the left or on the right" in metadata[0]["padding"]
    assert "padded on the right cannot be continued" in metadata[1]["padding"]


@pytest.mark.parametrize("width", [4, 8, 24])
def test_head_widths_that_onnxruntime_does_not_support_are_refused(
    width: int, tmp_path: Path
) -> None:
    """Onnxruntime would load the file and fail on the first text."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": width}
    model = Decoder(attrs.evolve(decoder().config, **sizes))
    initialize(model, 0)
    with pytest.raises(ExportError, match=f"for onnxruntime's GroupQueryAttention, got {width}"):
        export(qat(model, "ort.matmulnbits"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_its_runtime_refuses_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without verify, a new file is opened and run once."""
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
def test_file_modes_follow_the_umask(mask: int, command: str, setting: str, tmp_path: Path) -> None:
    """Libraries that write through temporary files would make them private."""
    file = write_run(tmp_path)
    old_umask = os.umask(mask)
    try:
        assert main([command, str(file), "--set", setting]) == 0
    finally:
        os.umask(old_umask)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~mask


def max_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference."""
    return float((actual - expected).abs().max())
