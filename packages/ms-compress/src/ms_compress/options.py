"""Settings of each command; importing them does not import torch."""

from pathlib import Path
from typing import Any

from attrs import Attribute, field, frozen

from ms_compress.errors import ConfigError
from ms_compress.evaluation.options import Evaluation
from ms_compress.methods.pattern import Pattern, Unstructured, parse_pattern
from ms_compress.quantization.scheme import Scheme
from ms_compress.settings import as_path, flag, integer, one_of, valid_path
from ms_compress.targets.rules import scheme
from ms_compress.training.options import Tuning
from ms_compress.used_settings import UsedIf, check_used


def names(value: Any) -> tuple[str, ...]:
    """Convert a name pattern, or a list of patterns, to a tuple."""
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        raise TypeError("use a list of name patterns")
    return tuple(patterns)


def named_scheme(value: Any) -> Scheme:
    """Convert a scheme's name to the scheme."""
    if not isinstance(value, str | Scheme):
        raise TypeError("use the name of a scheme, such as 'gguf.q4_0'")
    return scheme(value)


def new_folder(instance: object, attribute: "Attribute[Any]", value: Path) -> None:
    """Check that the path can be created as a folder and ends in a name."""
    valid_path(written="folder")(instance, attribute, value)
    if value.name in ("", ".."):
        raise ConfigError(
            f"{attribute.name} must end in the name of a new folder, got {str(value)!r}; add a name"
        )


@frozen(kw_only=True)
class ModelRun:
    """Settings of a run: model, text and output folder."""

    model: Path = field(
        converter=as_path, validator=valid_path(), metadata={"example": "runs/train/model"}
    )
    """Model folder in Hugging Face format."""
    output_dir: Path = field(
        converter=as_path, validator=new_folder, metadata={"example": "runs/{command}"}
    )
    """Output folder; must not exist yet, unless it has the result of the same run."""
    dataset: Path | None = field(
        default=None,
        converter=as_path,
        validator=valid_path(optional=True),
        metadata={"example": "shards", "needed": True},
    )
    """Shards from ms-data, text files, a file of conversations (JSON, CSV or Parquet), or a JSON
    list of token lists."""
    rows: int = field(default=256, validator=integer())
    """Number of rows to read from the dataset; training cycles through them."""
    ignore: tuple[str, ...] = field(default=(), converter=names)
    """Name patterns of layers to leave unchanged."""
    tuning: Tuning = field(factory=Tuning, metadata={"table": Tuning})
    """Training settings."""


@frozen(kw_only=True)
class SchemeRun(ModelRun):
    """Settings of a run that exports its result for a target."""

    scheme: Scheme = field(converter=named_scheme, metadata={"example": "gguf.q4_0"})
    """Storage format of the weights: gguf.q4_0, gguf.q8_0, ort.matmulnbits, ct.int4_g32, ..."""
    embeddings: bool = field(default=False, validator=flag)
    """Also quantize the embedding."""
    head: bool = field(default=False, validator=flag)
    """Also quantize the output head; if tied to the embedding, set both to the same value."""
    activations: bool = field(default=True, validator=flag)
    """Also quantize layer inputs, if the target's runtime does."""
    verify: bool = field(default=False, validator=flag)
    """Run the result in its runtime and fail unless it agrees with this model."""
    tokenizer: str | None = field(
        default=None,
        validator=valid_path(optional=True),
        metadata={"example": "runs/train/model"},
    )
    """tokenizer.json or its folder, to export with the model; default: the model folder's."""


DISTILLATION = "divergence distill_weight hidden_weight"
"""Tuning settings that need a teacher."""


def _refuse(tuning: Tuning, names: str, condition: str) -> None:
    """Refuse tuning settings that a run does not use, unless they have their default values."""
    check_used(tuning, (UsedIf(names, condition),), error=ConfigError, prefix="tuning.")


@frozen(kw_only=True)
class QatRun(SchemeRun):
    """Settings of `ms-compress qat`."""

    learned_scales: bool = field(default=True, validator=flag)
    """Also learn the scales of the weights."""
    start: str = field(default="nearest", validator=one_of("nearest", "gptq"))
    """Initial codes: round to nearest, or GPTQ by the loss on the dataset's first rows."""
    float_steps: int = field(default=0, validator=integer(minimum=0))
    """Steps of float training before quantization starts."""
    sparse: bool = field(default=False, validator=flag)
    """Keep zero weights at zero with a mask."""
    teacher: Path | None = field(
        default=None,
        converter=as_path,
        validator=valid_path(optional=True),
        metadata={"example": "runs/train/model"},
    )
    """Model folder of a teacher for logit distillation."""

    def __attrs_post_init__(self) -> None:
        if self.teacher is None:
            _refuse(self.tuning, DISTILLATION, "with a teacher")
        if not self.learned_scales:
            _refuse(self.tuning, "scale_rate", "with learned_scales=true")
        learns_layer_scales = self.learned_scales and not (self.embeddings or self.head)
        if self.start == "gptq" and not learns_layer_scales:
            raise ConfigError(
                "start='gptq' quantizes only decoder layers and learns their scales; set"
                " embeddings and head to false and learned_scales to true"
            )
        if self.float_steps >= self.tuning.steps:
            raise ConfigError(
                f"float_steps must be below tuning.steps={self.tuning.steps} to train any quantized"
                f" step, got {self.float_steps}; use fewer float steps"
            )


METHODS = (
    "rtn",
    "gptq",
    "autoround",
    "awq",
    "smoothquant",
    "awq+gptq",
    "smoothquant+gptq",
    "awq+autoround",
    "smoothquant+autoround",
)
"""Methods of `ms-compress quantize`; in `a+b`, a scales features and b rounds."""


@frozen(kw_only=True)
class QuantizeRun(SchemeRun):
    """Settings of `ms-compress quantize`; `export` sets only the model, scheme and output."""

    method: str = field(default="rtn", validator=one_of(*METHODS))
    """Round to nearest (rtn), or calibrate with the dataset's tokens: GPTQ compensates rounding
    errors, AutoRound learns the rounding of each weight, AWQ protects weights of large inputs,
    SmoothQuant moves outliers of inputs into weights."""
    fit_scales: bool = field(default=False, validator=flag)
    """Search for each group's scale with the smallest error; AWQ and K-quants always do."""
    importance: bool = field(default=False, validator=flag)
    """Weight errors in that search by the mean square of each input on the dataset, as llama.cpp
    does with an importance matrix."""
    act_order: bool = field(default=False, validator=flag)
    """GPTQ quantizes the columns with the largest inputs first (`actorder` weight)."""
    by_loss: bool = field(default=False, validator=flag)
    """GPTQ weights errors by their effect on the model's predictions."""
    iters: int = field(default=200, validator=integer())
    """Steps of AutoRound per decoder layer."""
    kv_cache: str = field(default="none", validator=one_of("none", "fp8"))
    """Store scales for an FP8 key-value cache in vLLM (fp8), calibrated on the dataset; for ct.*
    schemes."""

    @property
    def has_calibrated_inputs(self) -> bool:
        """Whether the scheme's input scales come from calibration tokens."""
        inputs = self.scheme.activations if self.activations else None
        return inputs is not None and inputs.is_calibrated

    @property
    def needs_dataset(self) -> bool:
        """True if the method reads the dataset although it rounds to nearest."""
        return self.importance or self.has_calibrated_inputs or self.kv_cache != "none"

    def __attrs_post_init__(self) -> None:
        if self.has_calibrated_inputs and self.dataset is None:
            raise ConfigError(
                f"scheme {self.scheme} needs calibration tokens for its input scales; set dataset,"
                " or use a scheme without calibration such as ct.fp8_dynamic or ct.nvfp4a16"
            )
        if self.kv_cache != "none" and self.dataset is None:
            raise ConfigError(
                f"kv_cache={self.kv_cache!r} needs calibration tokens for the scales of keys and"
                " values; set dataset, or leave kv_cache out"
            )
        if self.importance and (self.dataset is None or self.method != "rtn"):
            raise ConfigError(
                "importance=true needs a dataset and method='rtn' (GPTQ weights errors by itself),"
                f" got dataset {self.dataset} and method {self.method!r}; set dataset, or leave"
                " importance out"
            )
        unused = [name for name in ("act_order", "by_loss") if getattr(self, name)]
        if unused and "gptq" not in self.method:
            raise ConfigError(
                f"{unused[0]}=true is only used by GPTQ, got method={self.method!r}; set"
                f" method='gptq', 'awq+gptq' or 'smoothquant+gptq', or leave {unused[0]} out"
            )
        if self.iters != 200 and "autoround" not in self.method:
            raise ConfigError(
                f"iters is only used by AutoRound, got method={self.method!r}; set"
                " method='autoround', 'awq+autoround' or 'smoothquant+autoround', or leave iters"
                " out"
            )
        if self.method != "rtn" and (self.embeddings or self.head):
            raise ConfigError(
                f"method={self.method!r} quantizes only decoder layers; set embeddings and head to"
                " false"
            )
        rounds_inputs = self.activations and self.scheme.activations is not None
        if self.method.startswith("smoothquant") and not rounds_inputs:
            raise ConfigError(
                f"method={self.method!r} needs a scheme that quantizes inputs, got {self.scheme}"
                " without; use method='awq', or a scheme such as ct.w8a8"
            )


def listed(value: Any) -> tuple[str, ...]:
    """Convert a list of names, or names separated by commas, to a tuple."""
    items = value.split(",") if isinstance(value, str) else value
    return tuple(name.strip() for name in names(items))


@frozen(kw_only=True)
class CompareRun(ModelRun):
    """Settings of `ms-compress compare-schemes`."""

    schemes: tuple[str, ...] = field(
        default=("ct.w8a8", "ct.fp8_dynamic", "ct.int4_g32", "ct.mxfp4a16", "ct.nvfp4a16"),
        converter=listed,
    )
    """Names of the schemes to compare."""
    methods: tuple[str, ...] = field(default=("rtn",), converter=listed)
    """Methods to round each scheme with, as in `quantize`; smoothquant is skipped for schemes that
    do not quantize inputs."""
    tokenizer: str | None = field(default=None, validator=valid_path(optional=True))
    """tokenizer.json or its folder, for targets that need one; default: the model folder's."""

    def runs(self) -> list[QuantizeRun]:
        """Return the settings of each (scheme, method) pair.

        Raises:
            SchemeError, ConfigError: a scheme or method does not exist, or a dataset is missing.
        """
        pairs = [
            (name, method)
            for name in self.schemes
            for method in self.methods
            if not method.startswith("smoothquant") or scheme(name).activations is not None
        ]
        if not pairs:
            raise ConfigError(
                "schemes and methods must have at least one valid pair, got"
                f" {', '.join(self.schemes) or 'no schemes'} with"
                f" {', '.join(self.methods) or 'no methods'}; use schemes=ct.w8a8 methods=rtn"
            )
        shared = {
            key: getattr(self, key)
            for key in ("model", "output_dir", "dataset", "rows", "ignore", "tuning", "tokenizer")
        }
        return [QuantizeRun(scheme=name, method=method, **shared) for name, method in pairs]

    def __attrs_post_init__(self) -> None:
        self.runs()


@frozen(kw_only=True)
class PruneRun(ModelRun):
    """Settings of `ms-compress prune`."""

    pattern: Pattern = field(converter=parse_pattern, metadata={"example": "2:4"})
    """`"2:4"`, or a sparsity such as 0.5: for reap, the fraction of experts to remove."""
    method: str = field(
        default="magnitude", validator=one_of("magnitude", "wanda", "gradual", "reap")
    )
    """Prune in one shot by magnitude or Wanda, or gradually over the first half of training; reap
    removes whole experts."""
    retrain: bool = field(default=True, validator=flag)
    """Train after pruning."""

    def __attrs_post_init__(self) -> None:
        if self.method == "reap" and not isinstance(self.pattern, Unstructured):
            raise ConfigError(
                "method='reap' removes experts, so pattern must be their fraction, got"
                f" {self.pattern}; use 0.25"
            )
        if self.method == "reap" and self.ignore:
            raise ConfigError(
                "ignore is only used by methods that prune weights, got method='reap', which takes"
                " experts from all layers; leave ignore out"
            )
        if self.method == "gradual" and not self.retrain:
            raise ConfigError(
                "method='gradual' prunes during training, so retrain must be true, got false; set"
                " retrain=true, or use method='magnitude'"
            )
        _refuse(self.tuning, DISTILLATION, "with a teacher, by qat and distill")
        _refuse(self.tuning, "scale_rate", "with learned scales, by qat")


@frozen(kw_only=True)
class DistillRun(ModelRun):
    """Settings of `ms-compress distill`; `model` is the teacher."""

    layers: int | None = field(
        default=None, validator=integer(optional=True), metadata={"example": 6}
    )
    """Number of layers of the student; default: all."""
    inner: int | None = field(
        default=None, validator=integer(optional=True), metadata={"example": 1024}
    )
    """Feed-forward width of the student; default: unchanged."""


@frozen(kw_only=True)
class EvaluateRun(Evaluation):
    """Settings of `ms-compress evaluate`."""

    output_dir: Path = field(
        converter=as_path, validator=new_folder, metadata={"example": "runs/evaluate"}
    )
    """Output folder for report.json, report.txt and report.html."""
