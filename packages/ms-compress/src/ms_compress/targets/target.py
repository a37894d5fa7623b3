"""Definition of targets; each target package defines its own in `target.py`.

A `Format` describes the contents of a folder: how to recognize it, how to read its properties, and
which independent runtime computes it. A `Target` is a format that models can be exported to. No
code outside of a target's package depends on which target it is.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, overload

from attrs import field, frozen
from torch import Tensor

from ms_compress.arguments import check_type
from ms_compress.errors import ExportError
from ms_compress.files.tokenizer_source import TokenizerSource
from ms_compress.files.untrusted import check_path
from ms_compress.models.whole_model import WholeModel
from ms_compress.quantization.layers import K_SCALE
from ms_compress.settings import nearest
from ms_compress.targets.rules import TARGETS
from ms_compress.text_ends import TextEnds

Reader = Callable[[str], Tensor]
"""Read a tensor by its Hugging Face name as float32; KeyError if it does not exist."""


@frozen(kw_only=True, eq=False)
class LayerRun:
    """Input and output of one linear layer as computed by a runtime."""

    name: str
    x: Tensor
    """(..., K) float32."""
    out: Tensor
    """(..., N) float32."""
    has_bias: bool = True
    """Whether `out` includes the bias, if the layer has one."""
    input_group: int | None = None
    """Group size if the runtime rounds inputs to 8 bits though training did not; else None."""


LayerVisit = Callable[[LayerRun], object]


class Runtime(Protocol):
    """A model as computed by its deployment runtime."""

    name: str

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) float32 for tokens (B, S) int64."""
        ...

    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Return the seconds for a prefill of `tokens`, and for `steps` greedy tokens after it."""
        ...


class TextRuntime(Runtime, Protocol):
    """A runtime that also tokenizes and generates text with the exported tokenizer files."""

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; special tokens in it are recognized, and none is added."""
        ...

    def visit_layers(self, tokens: Tensor, visit: LayerVisit) -> None:
        """Run tokens (B, S) int64 and call `visit` for each linear layer the runtime exposes."""
        ...

    def ends(self) -> frozenset[int]:
        """Return the tokens at which the runtime ends a text."""
        ...

    def generate(self, tokens: list[int], max_tokens: int) -> list[int]:
        """Return greedily decoded tokens up to an end token, at most `max_tokens`."""
        ...


@frozen(kw_only=True)
class Assets:
    """Tokenizer and special tokens to export with the weights."""

    tokenizer: TokenizerSource | None
    ends: TextEnds


@frozen(kw_only=True)
class Contents:
    """Properties of a model read from a folder's files."""

    scheme: str
    """Storage format of most weights, such as `4-bit g32`, in the file's own terms."""
    weights: int
    """Number of weights in the model; tied weights count once."""
    vocabulary: int | None
    """Vocabulary size; None if unknown."""
    positions: int | None
    """Maximum text length; None if unknown."""


@frozen(kw_only=True)
class Format:
    """A format of model folders, and the runtime that computes it."""

    name: str
    """Name of its package."""
    holds: Callable[[Path], bool]
    """Return whether a folder has this format."""
    one_file: bool
    """Whether its model is a single file with a unique name; these formats are tried first."""
    weight_files: tuple[str, ...]
    """Glob patterns of the files with weights."""
    contents: Callable[[Path], Contents]
    """Read the properties of the model; ExportError if a file cannot be read."""
    opens: Callable[..., Runtime]
    """Open a folder with `threads` and `strict`, which rejects tensors that the runtime ignores;
    ExportError if the runtime is not installed or cannot read the folder."""


@frozen(kw_only=True)
class Target(Format):
    """A format that models can be exported to."""

    check: Callable[[WholeModel, Assets], None]
    """Check that the target supports the model: ExportError for the model, LayerError for a
    layer."""
    write: Callable[[WholeModel, Path, Assets, int], None]
    """Write into an existing folder. All ranks call it, and rank 0 writes. The integer is the
    `accuracy_level` of `export`."""
    reader: Callable[[Path, Mapping[str, Any]], Reader]
    """Given a folder and its model's config.json, return a reader of its tensors. It uses the
    format's own library and shares no code with `write`, so both cannot have the same bug."""
    opens: Callable[..., TextRuntime]
    """Open a folder in its runtime, which also reads and writes text."""
    runtime: str
    """Name of the runtime."""
    libraries: tuple[str, ...]
    """Modules that the runtime needs."""
    extra: str
    """Extra of ms-compress that installs them."""
    serve: str = ""
    """Command that serves a folder, with `{folder}` in place of its path."""
    example: str = ""
    """Python code that generates text with an exported folder, whose path is `{folder}`."""
    opens_cheaply: bool = True
    """Open every export once if the libraries are installed, instead of only when verifying."""
    keeps_stored_dtypes: bool = False
    """Store tensors that are not quantized in the dtypes of the base folder, instead of float32."""
    fuses_experts: bool = False
    """Whether the runtime fuses experts into one module, which does not round their inputs."""
    reads_kv_cache_scales: bool = False
    """Whether a runtime reads the scales of an FP8 key-value cache."""
    needs_tokenizer: bool = False
    """Whether the runtime needs an exported tokenizer to read text."""
    tolerance: float = field(default=1e-4)
    """Largest mean error of the runtime's logits, in units of their standard deviation."""


def has_kv_cache_scales(model: WholeModel) -> bool:
    """Return whether a model has scales for an FP8 key-value cache."""
    return any(name.endswith(f".{K_SCALE}") for name in model.tensors)


F = TypeVar("F", bound=Format)


def all_formats() -> list[Format]:
    """Return the formats of all target packages, single-file formats first."""
    formats: list[Format] = [
        import_module(f"ms_compress.targets.{name}.target").TARGET for name in TARGETS
    ]
    return sorted(formats, key=lambda item: not item.one_file)


def find_target(name: str) -> Target:
    """Return the target with a name such as `"gguf"`.

    Raises:
        ExportError: the target does not exist.
    """
    return _named(name, [item for item in all_formats() if isinstance(item, Target)])


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
        folder: exported model folder.
        target: `"ct"`, `"ort"`, `"gguf"` or `"float"`.
        threads: number of threads, for runtimes that do not use torch's.
        strict: reject a folder with tensors that the runtime ignores.

    Raises:
        ExportError: the runtime is not installed, or cannot read the folder.
    """
    check_path("folder", folder, error=ExportError)
    return _named(target, all_formats()).opens(Path(folder), threads=threads, strict=strict)


def _named(name: str, formats: Sequence[F]) -> F:
    check_type("target", name, str, "the name of a target", error=ExportError)
    by_name = {item.name: item for item in formats}
    if name not in by_name:
        raise ExportError(f"unknown target {name!r}; {nearest(name, by_name)}")
    return by_name[name]
