"""PyTorch in float32, with ms-parallel's models: the baseline for compressed models."""

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ms_compress.errors import ExportError
from ms_compress.targets.libraries import import_library


class TorchRuntime:
    """A plain folder run by torch in float32, with a KV cache."""

    name = "torch"

    def __init__(self, folder: Path) -> None:
        purpose = "running a plain model needs ms-parallel"
        import_library("ms_parallel", extra="parallel", purpose=purpose)
        from ms_parallel.models import KeyValueCache
        from ms_parallel.weights import load_model

        self.cache: Any = KeyValueCache
        from ms_parallel.errors import ParallelError

        try:
            self.model: Any = load_model(folder)
        except ParallelError as error:
            raise ExportError(str(error)) from error
        self.model.train(False)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) float32 for tokens (B, S) int64."""
        logits: Tensor = self.model(tokens)
        return logits

    @torch.no_grad()
    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Return the seconds for a prefill of `tokens`, and for `steps` greedy tokens after it."""
        cache = self.cache()
        start_s = perf_counter()
        token = self._next(torch.tensor([tokens]), cache)
        prefilled_s = perf_counter()
        for _ in range(steps):
            token = self._next(token, cache)  # (1, 1)
        return prefilled_s - start_s, perf_counter() - prefilled_s

    def _next(self, tokens: Tensor, cache: Any) -> Tensor:
        """Return the most likely next token, (1, 1); the head runs on the last position only."""
        hidden = self.model(tokens, cache=cache, logits=False)  # (1, S, H), normalized
        out: Tensor = self.model.head(hidden[:, -1:]).argmax(-1)
        return out
