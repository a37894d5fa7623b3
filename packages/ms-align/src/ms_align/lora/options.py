"""Settings of LoRA adapters."""

import math
import re
from collections.abc import Iterable
from typing import Any, Final, Literal

from attrs import field, frozen

from ms_align.errors import ConfigError
from ms_align.lora.quantized_base import BaseFormat
from ms_align.settings import flag, integer, number, one_of, short_repr
from ms_align.settings.run_file import table_of
from ms_align.used_settings import UsedIf, check_used

ALL_LINEAR: Final = "all-linear"
DEFAULT_TARGETS: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
MAX_ALPHA: Final = 1e6
"""Upper bound for alpha; beyond it the update would lose precision in float32."""
Initialization = Literal["default", "pissa", "olora"]
ExpertFiles = Literal["per_expert", "stacked"]


def _targets(value: Any) -> Any:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(
                f"target_modules must be names or a regular expression, got {value!r} ({error}); "
                "correct it"
            ) from error
        return value
    return _names("target_modules", "layer names or a regular expression", value)


def _parameters(value: Any) -> tuple[str, ...]:
    return _names("target_parameters", "a list of names of expert weights", value)


def _names(setting: str, description: str, value: Any) -> tuple[str, ...]:
    if (
        isinstance(value, str)
        or not isinstance(value, Iterable)
        or not all(isinstance(item, str) for item in value)
    ):
        raise ConfigError(f"{setting} must be {description}, got {short_repr(value)}; correct it")
    return tuple(value)


@frozen(kw_only=True)
class LoraOptions:
    """Adapted layers and rank."""

    rank: int = field(default=8, validator=integer())
    """Rank of the adapters."""
    alpha: float = field(default=16.0, validator=number(minimum=1e-6, maximum=MAX_ALPHA))
    """LoRA alpha; updates are scaled by alpha / rank."""
    target_modules: str | tuple[str, ...] = field(default=DEFAULT_TARGETS, converter=_targets)
    """Layers to adapt: a list of last parts of names, a regular expression for full names, or
    `all-linear` for all linear layers except the output head."""
    target_parameters: tuple[str, ...] = field(default=(), converter=_parameters)
    """Expert weights to adapt, by the last parts of their names in transformers, such as
    `["experts.gate_up_proj", "experts.down_proj"]`. Each expert gets its own adapter."""
    use_rslora: bool = field(default=False, validator=flag)
    """Scale by alpha / √rank instead (rsLoRA)."""
    use_dora: bool = field(default=False, validator=flag)
    """Also train the norm of each row of the weights (DoRA). Not for experts."""
    dropout: float = field(default=0.0, validator=number(minimum=0.0, below=1.0))
    """Dropout rate of the adapters' inputs in training steps. Not for experts, nor with `layout`.
    """
    init_lora_weights: Initialization = field(
        default="default", validator=one_of("default", "pissa", "olora")
    )
    """Initial adapters: `default` is random A and zero B; `pissa` takes the largest singular values
    of the weight, `olora` its QR factors. Their files have twice the rank, so that they apply to
    the unchanged base model."""
    expert_files: ExpertFiles = field(
        default="per_expert", validator=one_of("per_expert", "stacked")
    )
    """Format of saved adapters on experts: `per_expert` has one per expert and matrix, if the
    model's checkpoints do, which vLLM and peft load; `stacked` is peft's `target_parameters`."""
    quantize_base: BaseFormat = field(
        default="none", validator=one_of("none", "nf4", "int8", "fp8")
    )
    """Store the frozen weights of adapted layers in 4 (`nf4`) or 8 bits (`int8`, `fp8`), as in
    QLoRA. With `layout`, over data, context and pipeline only."""

    def __attrs_post_init__(self) -> None:
        if not self.target_modules and not self.target_parameters:
            raise ConfigError(
                "target_modules or target_parameters must name a layer, got neither; remove "
                "target_modules for its default"
            )
        rule = UsedIf("expert_files", "with lora.target_parameters", lambda o: o.target_parameters)
        check_used(self, (rule,), error=ConfigError, prefix="lora.")
        for setting in ("use_dora", "dropout"):
            if self.target_parameters and getattr(self, setting):
                raise ConfigError(
                    f"{setting} does not support experts, as peft's files cannot hold such "
                    f"adapters; remove {setting} or target_parameters"
                )

    @property
    def scale(self) -> float:
        """Factor s of the update B·A·x."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def lora_options(value: Any) -> LoraOptions | None:
    """Convert a `lora` setting: options, a table of them, or None.

    Raises:
        ConfigError: the value has another type.
    """
    return None if value is None else table_of(LoraOptions, "lora")(value)
