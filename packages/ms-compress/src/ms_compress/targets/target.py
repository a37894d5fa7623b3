"""The independent runtimes that read exported folders, behind one face.

A runtime is opened on a folder, gives logits of tokens, and prefill and decode speeds.
"""

from pathlib import Path
from typing import Literal, Protocol, overload

from torch import Tensor

__all__ = ["Runtime", "TextRuntime", "open_runtime"]


class Runtime(Protocol):
    """A model as its deployment runtime computes it."""

    name: str

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 to (B, S, V) float32."""
        ...

    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Seconds of a prefill of `tokens`, and of `steps` greedy tokens after it."""
        ...


class TextRuntime(Runtime, Protocol):
    """One that reads and writes texts with what its folder says of them."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, in which special tokens are what they spell; none is added."""
        ...

    def ends(self) -> frozenset[int]:
        """The tokens at which it ends a text by itself."""
        ...

    def generate(self, tokens: list[int], most: int) -> list[int]:
        """The likeliest next tokens, until one of them ends the text, `most` of them at most."""
        ...


@overload
def open_runtime(
    folder: Path, target: Literal["ct", "gguf", "ort"], *, threads: int = 1, strict: bool = True
) -> TextRuntime: ...


@overload
def open_runtime(
    folder: Path, target: str, *, threads: int = 1, strict: bool = True
) -> Runtime: ...


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
        from ms_compress.targets.ct.runtime import TransformersRuntime

        return TransformersRuntime(folder, strict=strict)
    if target == "ort":
        from ms_compress.targets.ort.runtime import OnnxRuntime

        return OnnxRuntime(folder, threads=threads)
    if target == "float":
        from ms_compress.targets.float.runtime import TorchRuntime

        return TorchRuntime(folder)
    from ms_compress.targets.gguf.runtime import LlamaRuntime

    return LlamaRuntime(folder, threads=threads)
