"""transformers, which reads compressed-tensors."""

import json
import logging
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ms_compress.errors import ExportError

__all__ = ["TransformersRuntime"]


class TransformersRuntime:
    """A folder as transformers computes it, in its own dtype."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        try:
            import compressed_tensors  # noqa: F401 - transformers imports it by itself
            import transformers
        except ImportError as error:
            raise ExportError(
                "reading compressed-tensors needs transformers and compressed-tensors:"
                " pip install 'ms-compress[ct]'"
            ) from error
        _quiet()
        try:
            self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=_dtype(folder), local_files_only=True
            )
            self.model.train(False)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ExportError(f"{folder}: transformers cannot read it: {error}") from error

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 to (B, S, V) float32."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits.float()

    @torch.no_grad()
    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Seconds of a prefill of `tokens`, and of `steps` greedy tokens after it."""
        began = perf_counter()
        out = self.model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        prefilled = perf_counter()
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
        return prefilled - began, perf_counter() - prefilled


def _dtype(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")


def _quiet() -> None:
    """Its advice on loading says nothing of a file that was just written."""
    for name in ("transformers.modeling_utils", "transformers.quantizers"):
        logging.getLogger(name).setLevel(logging.ERROR)
