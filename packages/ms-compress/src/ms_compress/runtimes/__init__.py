"""The independent runtimes that read exported folders, behind one face.

A runtime is opened on a folder, gives logits of tokens, and prefill and decode speeds.
"""

from pathlib import Path
from typing import Protocol

from torch import Tensor

__all__ = ["Runtime", "open_runtime"]


class Runtime(Protocol):
    """A model as its deployment runtime computes it."""

    name: str

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 to (B, S, V) float32."""
        ...

    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Seconds of a prefill of `tokens`, and of `steps` greedy tokens after it."""
        ...


def open_runtime(folder: Path, target: str, *, threads: int = 1, strict: bool = True) -> Runtime:
    """The runtime of a target, on a folder that was exported for it; `"float"` is plain torch.

    Args:
        folder: exported.
        target: `"ct"`, `"ort"`, `"gguf"` or `"float"`.
        threads: of the runtimes that do not share torch's.
        strict: refuse a folder with tensors that the runtime leaves out.

    Raises:
        ExportError: the runtime is not installed, or cannot read the folder.
    """
    if target == "ct":
        from ms_compress.runtimes.transformers import TransformersRuntime

        return TransformersRuntime(folder, strict=strict)
    if target == "ort":
        from ms_compress.runtimes.onnxruntime import OnnxRuntime

        return OnnxRuntime(folder, threads=threads)
    if target == "float":
        from ms_compress.runtimes.torch_float import TorchRuntime

        return TorchRuntime(folder)
    from ms_compress.runtimes.llama_cpp import LlamaRuntime

    return LlamaRuntime(folder, threads=threads)
