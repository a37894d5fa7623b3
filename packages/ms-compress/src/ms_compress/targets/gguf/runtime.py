"""llama.cpp, through its Python package, with a float32 cache of keys and values."""

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ms_compress.errors import ExportError
from ms_compress.targets.libraries import import_library
from ms_compress.targets.target import LayerVisit

FLOAT32 = 0
"""ggml's number of the type."""


class LlamaRuntime:
    """A folder as llama.cpp computes it."""

    name = "llama.cpp"

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        llama_cpp = import_library(
            "llama_cpp", extra="llama", purpose="running GGUF needs llama-cpp-python"
        )
        self.library = llama_cpp
        self.threads = threads
        self.path = folder / "model.gguf"
        _silence(llama_cpp)
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        # Repacked weights are faster where the build's kernels fit the processor, and have crashed
        # where they do not.
        parameters.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(self.path).encode(), parameters)
        if not self.model:
            raise ExportError(f"{self.path}: llama.cpp cannot read it")
        self._texts = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(self._texts)

    def _context(self, positions: int) -> Any:
        parameters = self.library.llama_context_default_params()
        parameters.n_ctx = max(positions, 32)
        parameters.n_batch = parameters.n_ubatch = max(positions, 32)
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k = parameters.type_v = FLOAT32
        parameters.flash_attn_type = 0
        parameters.no_perf = True
        context = self.library.llama_init_from_model(self.model, parameters)
        if not context:
            raise ExportError(f"{self.path}: llama.cpp gives no context of {positions} positions")
        return context

    def _feed(self, context: Any, tokens: list[int], first: int, every: bool) -> Any:
        """Decode tokens at positions from `first` on; logits of all, or of the last."""
        batch = self.library.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, first + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = every or i == len(tokens) - 1
            if self.library.llama_decode(context, batch):
                raise ExportError(f"{self.path}: llama.cpp could not decode")
        finally:
            self.library.llama_batch_free(batch)
        rows = len(tokens) if every else 1
        pointer = self.library.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, shape=(rows, self.vocabulary)).copy()

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) float32 of tokens (B, S) int64."""
        rows = []
        for row in tokens.tolist():
            context = self._context(len(row))
            rows.append(torch.from_numpy(self._feed(context, row, 0, every=True)))
            self.library.llama_free(context)
        return torch.stack(rows)

    def visit_layers(self, tokens: Tensor, visit: LayerVisit) -> None:
        """Do nothing: llama.cpp's Python package shows no layer's values."""

    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Measure the seconds of a prefill of `tokens`, and of `steps` greedy tokens after it."""
        context = self._context(len(tokens) + steps)
        began = perf_counter()
        logits = self._feed(context, tokens, 0, every=False)
        prefilled = perf_counter()
        for step in range(steps):
            logits = self._feed(context, [int(logits[-1].argmax())], len(tokens) + step, False)
        ended = perf_counter()
        self.library.llama_free(context)
        return prefilled - began, ended - prefilled

    def encode(self, text: str) -> list[int]:
        """Return tokens of a text; special tokens in it are recognised, and none is added."""
        raw = text.encode()
        room = (self.library.llama_token * (len(raw) + 1))()
        count = self.library.llama_tokenize(
            self._texts, raw, len(raw), room, len(room), False, True
        )
        if count < 0:
            raise ExportError(f"{self.path}: llama.cpp cannot tokenize {text!r}")
        return list(room[:count])

    def ends(self) -> frozenset[int]:
        """Return the tokens at which the runtime ends a text by itself."""
        is_end = self.library.llama_vocab_is_eog
        return frozenset(n for n in range(self.vocabulary) if is_end(self._texts, n))

    def generate(self, tokens: list[int], most: int) -> list[int]:
        """Return the likeliest next tokens until one ends the text, `most` of them at most."""
        context, made = self._context(len(tokens) + most), list[int]()
        try:
            logits = self._feed(context, tokens, 0, every=False)
            while len(made) < most:
                made.append(int(logits[-1].argmax()))
                ended = self.library.llama_vocab_is_eog(self._texts, made[-1])
                if ended or len(made) == most:
                    break
                logits = self._feed(context, made[-1:], len(tokens) + len(made) - 1, False)
        finally:
            self.library.llama_free(context)
        return made

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self.library.llama_model_free(self.model)
            self.model = None


def _silence(library: Any) -> None:
    """Silence the library's log. The callback must live as long as the library."""
    if not hasattr(LlamaRuntime, "quiet"):
        kind = library.llama_log_callback
        LlamaRuntime.quiet = kind(lambda level, text, data: None)  # type: ignore[attr-defined]
        library.llama_log_set(LlamaRuntime.quiet, None)  # type: ignore[attr-defined]
