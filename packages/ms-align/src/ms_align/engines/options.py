"""Engine settings that all run files share.

The engine of one process supports `device` and `save_dtype`. The other settings need ms-parallel's
engine, which a layout selects, even `{ data = 1 }`.
"""

import re
from typing import Any, Literal

from attrs import Attribute, field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import flag, number, one_of, short_repr

MixedPrecision = bool | Literal["float16"]
DTYPES = ("float32", "bfloat16", "float16", "float64")
RECOMPUTE = ("none", "selective", "attention", "full")
SIZE = re.compile(r"[0-9]+(\.[0-9]+)? *([KMGT]i?)?B")
DEVICE = re.compile(r"[a-z]+(:[0-9]+)?")


HONORED: dict[str, tuple[Any, ...]] = {
    "mixed_precision": (False,),
    "float8": ("none",),
    "ops": ("torch",),
    "recompute": ("none",),
    "compile": (False,),
    "sharding": ("auto", "replicate"),
    "offload": ("none",),
    "balance": ("none",),
    "balance_coefficient": (None,),
}
"""Values of ms-parallel settings that the single-process engine supports, the default first."""


def _mixed_precision(value: Any) -> Any:
    if isinstance(value, bool) or value == "float16":
        return value
    if value == "bfloat16":
        return True
    raise ConfigError(
        f"mixed_precision must be true (bfloat16), false or 'float16', got {short_repr(value)}"
    )


def _recompute(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if isinstance(value, str) and (value in RECOMPUTE or SIZE.fullmatch(value)):
        return
    names = ", ".join(map(repr, RECOMPUTE))
    raise ConfigError(
        f"recompute must be {names} or a size such as '8GiB', got {short_repr(value)}"
    )


def _device(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if value is not None and not (isinstance(value, str) and DEVICE.fullmatch(value)):
        raise ConfigError(
            f"device must be 'cpu' or an accelerator such as 'cuda:0', got {short_repr(value)}"
        )


def _dtype(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if value is not None:
        one_of(*DTYPES)(instance, attribute, value)


@frozen(kw_only=True, slots=False)  # options classes inherit from more than one
class DeviceOptions:
    """Device."""

    device: str | None = field(default=None, validator=_device)
    """`cpu` or an accelerator such as `cuda:0`. Default: this machine's accelerator, if any."""


@frozen(kw_only=True, slots=False)
class ComputeOptions(DeviceOptions):
    """Precision and operators."""

    mixed_precision: MixedPrecision = field(default=False, converter=_mixed_precision)
    """Compute in bfloat16 (true) or `float16`. Weights, optimizer state and reductions stay
    float32. Needs `layout`."""
    ops: str = field(default="torch", validator=one_of("torch", "ms_kernels"))
    """Model operators: `torch` or `ms_kernels`; the latter needs `layout`."""

    def check_single_process(self, remedy: str = "set `layout = { data = 1 }`") -> None:
        """Check that the single-process engine supports all settings.

        Raises:
            ConfigError: names the first unsupported setting and the remedy.
        """
        for name, honored in HONORED.items():
            value = getattr(self, name, honored[0])
            if value not in honored:
                written = str(value).lower() if isinstance(value, bool) else repr(value)
                raise ConfigError(f"{name} = {written} needs ms-parallel's engine; {remedy}")


@frozen(kw_only=True, slots=False)
class EngineOptions(ComputeOptions):
    """Precision, memory and sharding in training."""

    float8: str = field(default="none", validator=one_of("none", "rowwise", "blockwise", "mxfp8"))
    """Round the factors of matrix products in blocks to float8 e4m3, with scales per row
    (`rowwise`), per 128 x 128 block (`blockwise`) or per 32 elements (`mxfp8`). Needs `layout`."""
    recompute: str = field(default="none", validator=_recompute)
    """Activation checkpointing: `none`, `selective` (recompute cheap operators), `attention`,
    `full`, or a memory limit per rank such as `8GiB`. Needs `layout`."""
    compile: bool = field(default=False, validator=flag)
    """Compile each block with torch.compile in training. Needs `layout`."""
    sharding: str = field(
        default="auto", validator=one_of("auto", "replicate", "zero1", "zero2", "zero3")
    )
    """State that is sharded over data ranks: `replicate` none, `zero1` optimizer state, `zero2`
    also gradients, `zero3` also weights; `auto` depends on the layout."""
    offload: str = field(default="none", validator=one_of("none", "moments", "activations", "all"))
    """Keep AdamW's `moments`, saved `activations`, or `all` of these in host memory. Needs
    `layout`."""
    balance: str = field(default="none", validator=one_of("none", "step", "sequence", "bias"))
    """Load balancing of experts: `step`, a loss on the loads of the previous update; `sequence`, a
    loss per document; `bias`, a correction of the router's scores; or `none`. All but `none` need
    `layout`."""
    balance_coefficient: float | None = field(default=None, validator=number(optional=True))
    """Weight of the balance loss. Default: router_aux_loss_coef of the model's config.json."""
    save_dtype: str | None = field(default=None, validator=_dtype)
    """Dtype of the saved model: `float32`, `bfloat16`, `float16` or `float64`. Default: the dtype
    of the base model's folder."""
