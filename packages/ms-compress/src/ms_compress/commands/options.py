"""Settings of each command; reading them needs no torch."""

from pathlib import Path
from typing import Any

from attrs import Attribute, field, frozen

from ms_compress.errors import ConfigError
from ms_compress.evaluation.options import Evaluation
from ms_compress.methods.pattern import Pattern, pattern
from ms_compress.quantisation.scheme import Scheme
from ms_compress.settings import a_path, as_path, flag, one_of, whole
from ms_compress.targets.rules import scheme
from ms_compress.training.options import Tuning


def names(value: Any) -> tuple[str, ...]:
    """Convert one pattern of names, or a list of them, to a tuple."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise TypeError("give a list of patterns of names")
    return tuple(given)


def named_scheme(value: Any) -> Scheme:
    """Convert a name to its scheme."""
    if not isinstance(value, str | Scheme):
        raise TypeError("give the name of a scheme, such as 'gguf.q4_0'")
    return scheme(value)


def new_folder(instance: object, attribute: "Attribute[Any]", value: Path) -> None:
    """Refuse a path whose last part cannot name a folder, and files beside it."""
    a_path(written="folder")(instance, attribute, value)
    if value.name in ("", ".."):
        raise ConfigError(
            f"{attribute.name} is {str(value)!r}; give a path that ends in the name of a new folder"
        )


@frozen(kw_only=True)
class ModelRun:
    """Settings of a run: which model, on what text, to which folder."""

    model: Path = field(
        converter=as_path, validator=a_path(), metadata={"example": "runs/train/model"}
    )
    """A Hugging Face folder."""
    output_dir: Path = field(
        converter=as_path, validator=new_folder, metadata={"example": "runs/{command}"}
    )
    """The folder to write; it must not exist yet, unless it is this run's own result."""
    dataset: Path | None = field(
        default=None,
        converter=as_path,
        validator=a_path(optional=True),
        metadata={"example": "shards", "needed": True},
    )
    """ms-data's shards, a file of conversations (JSON, CSV or Parquet), or a JSON list of lists of
    tokens."""
    rows: int = field(default=256, validator=whole())
    """Rows of text that are read of it, and used in turn."""
    exceptions: tuple[str, ...] = field(default=(), converter=names)
    """Patterns of names of layers that stay as they are."""
    tuning: Tuning = field(factory=Tuning, metadata={"table": Tuning})
    """How it is trained."""


@frozen(kw_only=True)
class SchemeRun(ModelRun):
    """Settings of a run whose result is exported for a target."""

    scheme: Scheme = field(converter=named_scheme, metadata={"example": "gguf.q4_0"})
    """How weights are held: gguf.q4_0, gguf.q8_0, ort.matmulnbits, ct.int4_g32, ct.w8a8, ..."""
    embeddings: bool = field(default=False, validator=flag)
    """Round the embedding too."""
    head: bool = field(default=False, validator=flag)
    """Round the output head too; where it shares the embedding's weight, set both alike."""
    activations: bool = field(default=True, validator=flag)
    """Round inputs too, where the target's runtime does."""
    verify: bool = field(default=False, validator=flag)
    """Read the result back through its runtime, and refuse it unless it is this model."""
    tokenizer: str | None = field(
        default=None,
        validator=a_path(optional=True),
        metadata={"example": "runs/train/model"},
    )
    """A tokenizer.json or its folder to go with it; by default the model folder's own."""


@frozen(kw_only=True)
class QatRun(SchemeRun):
    """Settings of `ms-compress qat`."""

    learned_scales: bool = field(default=True, validator=flag)
    """Learn the scales of weights too."""
    start: str = field(default="nearest", validator=one_of("nearest", "gptq"))
    """From the nearest codes, or from those of GPTQ by the loss, on the dataset's first rows."""
    float_steps: int = field(default=0, validator=whole(least=0))
    """Steps before anything is rounded."""
    sparse: bool = field(default=False, validator=flag)
    """Keep the model's zeros as a mask."""
    teacher: Path | None = field(
        default=None,
        converter=as_path,
        validator=a_path(optional=True),
        metadata={"example": "runs/train/model"},
    )
    """A model folder whose logits are distilled."""

    def __attrs_post_init__(self) -> None:
        plain = self.learned_scales and not (self.embeddings or self.head)
        if self.start == "gptq" and not plain:
            raise ConfigError(
                "start='gptq' quantizes only decoder layers and learns their scales; set"
                " embeddings and head to false and learned_scales to true"
            )
        if self.float_steps >= self.tuning.steps:
            raise ConfigError(
                f"float_steps is {self.float_steps} of tuning.steps={self.tuning.steps}, so no step"
                " would meet what is rounded; give fewer"
            )


@frozen(kw_only=True)
class QuantizeRun(SchemeRun):
    """Settings of `ms-compress quantize` and `export`."""

    method: str = field(default="rtn", validator=one_of("rtn", "gptq"))
    """Round to nearest, or GPTQ with the dataset's tokens."""
    fit_scales: bool = field(default=False, validator=flag)
    """Search for the scale of each group that errs least."""
    act_order: bool = field(default=False, validator=flag)
    """Let GPTQ round columns of the largest inputs first."""
    by_loss: bool = field(default=False, validator=flag)
    """Let GPTQ count errors by what they do to the model's predictions."""

    def __attrs_post_init__(self) -> None:
        if self.method == "gptq" and (self.embeddings or self.head):
            raise ConfigError(
                "method='gptq' quantizes only decoder layers; set embeddings and head to false"
            )


@frozen(kw_only=True)
class PruneRun(ModelRun):
    """Settings of `ms-compress prune`."""

    pattern: Pattern = field(converter=pattern, metadata={"example": "2:4"})
    """`"2:4"`, or a share such as 0.5."""
    method: str = field(default="magnitude", validator=one_of("magnitude", "wanda", "gradual"))
    """At once by magnitude or Wanda, or gradually over the first half of the training."""
    retrain: bool = field(default=True, validator=flag)
    """Train on after it."""


@frozen(kw_only=True)
class DistillRun(ModelRun):
    """Settings of `ms-compress distill`; `model` is the teacher."""

    layers: int | None = field(
        default=None, validator=whole(optional=True), metadata={"example": 6}
    )
    """Layers of the student; all by default."""
    inner: int | None = field(
        default=None, validator=whole(optional=True), metadata={"example": 1024}
    )
    """Neurons of each feed-forward of the student; all by default."""


@frozen(kw_only=True)
class EvaluateRun(Evaluation):
    """Settings of `ms-compress evaluate`."""

    output_dir: Path = field(
        converter=as_path, validator=new_folder, metadata={"example": "runs/evaluate"}
    )
    """The folder for report.json, report.txt and report.html."""
