"""llama.cpp as a runtime, through llama-cpp-python, with a float32 KV cache."""

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
"""ggml's id of the type."""


class LlamaRuntime:
    """A folder run by llama.cpp."""

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
        # Repacked weights are faster if the build's kernels match the CPU, and have crashed
        # otherwise.
        parameters.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(self.path).encode(), parameters)
        if not self.model:
            raise ExportError(f"{self.path}: llama.cpp cannot read it")
        self._vocab_handle = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(self._vocab_handle)

    def _context(self, positions: int) -> Any:
        parameters = self.library.llama_context_default_params()
        parameters.n_ctx = max(positions, 32)
        # The whole prompt is one batch, so its logits come from a single forward.
        parameters.n_batch = parameters.n_ubatch = max(positions, 32)
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k = parameters.type_v = FLOAT32  # no rounding of keys and values
        parameters.flash_attn_type = 0  # disabled
        parameters.no_perf = True
        context = self.library.llama_init_from_model(self.model, parameters)
        if not context:
            raise ExportError(f"{self.path}: llama.cpp gives no context of {positions} positions")
        return context

    def _feed(self, context: Any, tokens: list[int], first: int, all_logits: bool) -> Any:
        """Decode tokens at positions from `first` on; return the logits of all or only the last."""
        batch = self.library.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, first + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0  # one sequence, with id 0
                batch.logits[i] = all_logits or i == len(tokens) - 1
            if self.library.llama_decode(context, batch):
                raise ExportError(f"{self.path}: llama.cpp could not decode")
        finally:
            self.library.llama_batch_free(batch)
        rows = len(tokens) if all_logits else 1
        # The library's own buffer, which the next decode overwrites: hence the copy.
        pointer = self.library.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, shape=(rows, self.vocabulary)).copy()

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) float32 for tokens (B, S) int64."""
        rows = []
        for row in tokens.tolist():
            # A new context for each row, as its KV cache would continue the previous row.
            context = self._context(len(row))
            rows.append(torch.from_numpy(self._feed(context, row, 0, all_logits=True)))
            self.library.llama_free(context)
        return torch.stack(rows)

    def visit_layers(self, tokens: Tensor, visit: LayerVisit) -> None:
        """Do nothing: llama-cpp-python does not expose the values of layers."""

    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Return the seconds for a prefill of `tokens`, and for `steps` greedy tokens after it."""
        context = self._context(len(tokens) + steps)
        start_s = perf_counter()
        logits = self._feed(context, tokens, 0, all_logits=False)
        prefilled_s = perf_counter()
        for step in range(steps):
            logits = self._feed(context, [int(logits[-1].argmax())], len(tokens) + step, False)
        end_s = perf_counter()
        self.library.llama_free(context)
        return prefilled_s - start_s, end_s - prefilled_s

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; special tokens in it are recognized, and none is added."""
        utf8 = text.encode()
        # Byte-level BPE gives at most one token per byte.
        buffer = (self.library.llama_token * (len(utf8) + 1))()
        count = self.library.llama_tokenize(
            self._vocab_handle, utf8, len(utf8), buffer, len(buffer), False, True
        )
        if count < 0:
            raise ExportError(f"{self.path}: llama.cpp cannot tokenize {text!r}")
        return list(buffer[:count])

    def ends(self) -> frozenset[int]:
        """Return the tokens at which the runtime ends a text."""
        is_end = self.library.llama_vocab_is_eog
        return frozenset(
            token for token in range(self.vocabulary) if is_end(self._vocab_handle, token)
        )

    def generate(self, tokens: list[int], max_tokens: int) -> list[int]:
        """Return greedily decoded tokens up to an end token, at most `max_tokens`."""
        context, generated = self._context(len(tokens) + max_tokens), list[int]()
        try:
            logits = self._feed(context, tokens, 0, all_logits=False)
            while len(generated) < max_tokens:
                generated.append(int(logits[-1].argmax()))
                is_end = self.library.llama_vocab_is_eog(self._vocab_handle, generated[-1])
                if is_end or len(generated) == max_tokens:
                    break
                logits = self._feed(
                    context, generated[-1:], len(tokens) + len(generated) - 1, False
                )
        finally:
            self.library.llama_free(context)
        return generated

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self.library.llama_model_free(self.model)
            self.model = None


def _silence(library: Any) -> None:
    """Disable the library's log. The callback must live as long as the library."""
    if not hasattr(LlamaRuntime, "quiet"):
        callback_type = library.llama_log_callback
        LlamaRuntime.quiet = callback_type(lambda level, text, data: None)  # type: ignore[attr-defined]
        library.llama_log_set(LlamaRuntime.quiet, None)  # type: ignore[attr-defined]
