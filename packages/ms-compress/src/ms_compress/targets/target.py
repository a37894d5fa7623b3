"""What a target is: one value, which its folder of this room states in `target.py`.

A `Format` is what a folder can hold: how it is known, what its files say, and which independent
runtime computes it. A `Target` is a format that models are exported to. Nothing outside of a
target's folder asks which one it is.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, overload

from attrs import field, frozen
from torch import Tensor

from ms_compress.errors import ExportError
from ms_compress.files.tokenizer_source import TokenizerSource
from ms_compress.files.untrusted import check_path
from ms_compress.models.whole_model import WholeModel
from ms_compress.settings import nearest
from ms_compress.targets.rules import TARGETS
from ms_compress.text_ends import TextEnds

Reader = Callable[[str], Tensor]
"""Reads the tensor of a Hugging Face name as float32; a KeyError if it is not there."""


@frozen(kw_only=True, eq=False)
class LayerRun:
    """Input and output of one linear layer, as a runtime computed them."""

    name: str
    x: Tensor
    """(..., K) float32."""
    out: Tensor
    """(..., N) float32."""
    has_bias: bool = True
    """Whether `out` includes the bias, if the layer has one."""
    input_group: int | None = None
    """The runtime rounds inputs to 8 bits in groups of this size, which training left out."""


LayerVisit = Callable[[LayerRun], object]


class Runtime(Protocol):
    """A model as its deployment runtime computes it."""

    name: str

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) float32 of tokens (B, S) int64."""
        ...

    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Measure the seconds of a prefill of `tokens`, and of `steps` greedy tokens after it."""
        ...


class TextRuntime(Runtime, Protocol):
    """One that reads and writes texts with what its folder says of them."""

    def encode(self, text: str) -> list[int]:
        """Return tokens of a text; special tokens in it are recognised, and none is added."""
        ...

    def visit_layers(self, tokens: Tensor, visit: LayerVisit) -> None:
        """Run tokens (B, S) int64 and call `visit` for each linear layer that the runtime shows."""
        ...

    def ends(self) -> frozenset[int]:
        """Return the tokens at which the runtime ends a text by itself."""
        ...

    def generate(self, tokens: list[int], most: int) -> list[int]:
        """Return the likeliest next tokens until one ends the text, `most` of them at most."""
        ...


@frozen(kw_only=True)
class Assets:
    """What is exported beside the weights."""

    tokenizer: TokenizerSource | None
    ends: TextEnds


@frozen(kw_only=True)
class Contents:
    """What a folder's files say of the model in them."""

    scheme: str
    """How most weights are held, such as `4-bit g32`, in the file's own words."""
    weights: int
    """Number of the model's weights, tied ones counted once."""
    vocabulary: int | None
    """None where the folder does not say."""
    positions: int | None
    """The longest text; None where the folder does not say."""


@frozen(kw_only=True)
class Format:
    """What a folder can hold, and the runtime that computes it."""

    name: str
    """As its folder is called."""
    holds: Callable[[Path], bool]
    """Whether a folder is of this format."""
    one_file: bool
    """Its model is one file, with a name that no other format has: it is looked for first."""
    weight_files: tuple[str, ...]
    """Patterns of the files that hold weights."""
    contents: Callable[[Path], Contents]
    """Reads what the files say; an ExportError if they cannot be read."""
    opens: Callable[..., Runtime]
    """Opens a folder, given `threads` and `strict`, which refuses tensors that the runtime leaves
    out; an ExportError if the runtime is not installed, or cannot read the folder."""


@frozen(kw_only=True)
class Target(Format):
    """A format that models are exported to."""

    check: Callable[[WholeModel, Assets], None]
    """Refuses what the target does not take: ExportError for the model as a whole, LayerError for
    one of its layers."""
    write: Callable[[WholeModel, Path, Assets, int], None]
    """Writes into a folder that exists; all processes call it, and the first one writes. The number
    is the `accuracy_level` of `export`."""
    reader: Callable[[Path, Mapping[str, Any]], Reader]
    """Given a folder and its model's config.json, reads tensors by the format's own library, and by
    other means than `write`, so that no mistake is made on both sides."""
    opens: Callable[..., TextRuntime]
    """Opens a folder in its runtime, which also reads and writes texts."""
    runtime: str
    """The runtime's name."""
    libraries: tuple[str, ...]
    """Modules that the runtime needs."""
    extra: str
    """The extra of ms-compress that installs them."""
    opens_cheaply: bool = True
    """Each export is opened once, where the libraries are there; else only if it is verified."""
    needs_tokenizer: bool = False
    """The runtime reads no text unless a tokenizer was exported with the model."""
    tolerance: float = field(default=1e-4)
    """How far the runtime's logits may be off on average, in units of their spread."""


F = TypeVar("F", bound=Format)


def all_formats() -> list[Format]:
    """Return the value of each folder of this room."""
    found: list[Format] = [
        import_module(f"ms_compress.targets.{name}.target").TARGET for name in TARGETS
    ]
    return sorted(found, key=lambda each: not each.one_file)


def find_target(name: str) -> Target:
    """Return the target of a name such as `"gguf"`.

    Raises:
        ExportError: there is none.
    """
    return _named(name, [each for each in all_formats() if isinstance(each, Target)])


@overload
def open_runtime(
    folder: str | Path,
    target: Literal["ct", "gguf", "ort"],
    *,
    threads: int = ...,
    strict: bool = ...,
) -> TextRuntime: ...


@overload
def open_runtime(
    folder: str | Path, target: str, *, threads: int = ..., strict: bool = ...
) -> Runtime: ...


def open_runtime(
    folder: str | Path, target: str, *, threads: int = 1, strict: bool = True
) -> Runtime:
    """Open a folder in the runtime of its target; `"float"` is plain torch.

    Args:
        folder: exported.
        target: `"ct"`, `"ort"`, `"gguf"` or `"float"`.
        threads: of the runtimes that do not share torch's.
        strict: refuse a folder with tensors that the runtime leaves out.

    Raises:
        ExportError: the runtime is not installed, or cannot read the folder.
    """
    check_path("folder", folder, error=ExportError)
    return _named(target, all_formats()).opens(Path(folder), threads=threads, strict=strict)


def _named(name: str, formats: Sequence[F]) -> F:
    known = {each.name: each for each in formats}
    if name not in known:
        raise ExportError(f"there is no target {name!r}; {nearest(name, known)}")
    return known[name]
