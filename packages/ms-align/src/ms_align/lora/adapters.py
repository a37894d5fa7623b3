"""LoRA adapters for the nn.Linear layers of any model, compatible with peft's files.

Hu et al., 2021: y = W·x + s·B·(A·x), s = alpha / rank, or alpha / √rank (Kalajdzievski, 2023). B
is initialized to 0, so an adapted model initially equals its base model. Only A and B are trained.
Shapes: r rank, I inputs, O outputs of a linear layer.
"""

import copy
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ms_align.arguments import check_type
from ms_align.errors import ConfigError, ModelError, WriteError
from ms_align.files.untrusted import check_path
from ms_align.lora.adapter_file import LARGEST_ALPHA, AdapterConfig, write_adapter
from ms_align.lora.quantized_base import BaseFormat, QuantizedLinear
from ms_align.models.language_model import copy_of
from ms_align.settings import flag, integer, number, one_of, short_repr
from ms_align.settings.run_file import table_of

ALL_LINEAR = "all-linear"
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


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
    if not isinstance(value, Iterable) or not all(isinstance(item, str) for item in value):
        raise ConfigError(
            f"target_modules must be layer names or a regular expression, got {short_repr(value)}; "
            "correct it"
        )
    return tuple(value)


@frozen(kw_only=True)
class LoraOptions:
    """Adapted layers and rank."""

    rank: int = field(default=8, validator=integer())
    """Rank of the adapters."""
    alpha: float = field(default=16.0, validator=number(minimum=1e-6, maximum=LARGEST_ALPHA))
    """LoRA alpha; updates are scaled by alpha / rank."""
    target_modules: str | tuple[str, ...] = field(default=DEFAULT_TARGETS, converter=_targets)
    """Layers to adapt: a list of last parts of names, a regular expression for full names, or
    `all-linear` for all linear layers except the output head."""
    use_rslora: bool = field(default=False, validator=flag)
    """Scale by alpha / √rank instead (rsLoRA)."""
    quantize_base: BaseFormat = field(
        default="none", validator=one_of("none", "nf4", "int8", "fp8")
    )
    """Store the frozen weights of adapted layers in 4 (`nf4`) or 8 bits (`int8`, `fp8`), as in
    QLoRA. Not with `layout`."""

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


class LoraLinear(nn.Module):
    """Linear layer with an adapter.

    Args:
        base: layer to adapt; it is frozen.
        rank: r.
        scale: factor s of the update B·A·x.
        quantize_base: format in which the frozen weight is stored.
    """

    def __init__(
        self, base: nn.Linear, rank: int, scale: float, quantize_base: BaseFormat = "none"
    ) -> None:
        super().__init__()
        base.requires_grad_(False)
        is_plain = quantize_base == "none"
        self.base_layer = base if is_plain else QuantizedLinear(base, quantize_base)
        factory: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Parameter(torch.empty((rank, base.in_features), **factory))
        self.lora_B = nn.Parameter(torch.empty((base.out_features, rank), **factory))
        self.initialize(0)
        self.scale = scale
        self.enabled = True
        self._original_weight: Tensor | None = None
        self._quantized: list[QuantizedLinear] = []
        """The quantized layer while its weight is merged; in a list, so that it is no submodule."""

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Sample A uniformly from ±1/√I, as peft does, and set B to 0."""
        generator = torch.Generator().manual_seed(seed)
        bound = 1.0 / math.sqrt(self.in_features)  # Kaiming uniform with a = √5, as in nn.Linear
        # Drawn on the CPU, so that all devices get the same values.
        self.lora_A.copy_(torch.rand(self.lora_A.shape, generator=generator) * 2 * bound - bound)
        self.lora_B.zero_()

    @property
    def in_features(self) -> int:
        """Number of inputs, I."""
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        """Number of outputs, O."""
        return self.base_layer.out_features

    @property
    def weight(self) -> Tensor:
        """Effective weight W + s·B·A, (O, I)."""
        if not self.enabled or self.merged:
            return self.base_layer.weight
        return self.base_layer.weight + self.delta().to(self.base_layer.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """Bias of the base layer."""
        return cast("Tensor | None", self.base_layer.bias)

    @property
    def merged(self) -> bool:
        """True if the adapter is merged into the layer's weight."""
        return self._original_weight is not None or bool(self._quantized)

    def delta(self) -> Tensor:
        """Compute s·B·A, (O, I)."""
        return self.scale * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, and the adapter unless disabled or merged, (..., I) to (..., O)."""
        y: Tensor = self.base_layer(x)
        if not self.enabled or self.merged:
            return y
        # FSDP casts only the base layer under mixed precision; the adapter stays in float32.
        a, b = self.lora_A.to(x.dtype), (self.scale * self.lora_B).to(x.dtype)  # (r, I), (O, r)
        return y + F.linear(F.linear(x, a), b)

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapter into the weight, keeping a copy of the original."""
        if self.merged:
            return
        if isinstance(self.base_layer, QuantizedLinear):
            # The merged weight is stored in full; `unmerge` goes back to the quantized one.
            self._quantized = [self.base_layer]
            self.base_layer = self.base_layer.plain()
            self.base_layer.weight += self.delta()
        else:
            weight, delta = self.base_layer.weight, self.delta()
            # Kept, as subtracting the delta again would not restore every bit.
            original = weight.clone()
            if isinstance(weight, DTensor):  # this rank's shard
                layout = weight.device_mesh, weight.placements
                # Every rank computes the same delta and takes its shard without communication.
                delta = distribute_tensor(delta, *layout, src_data_rank=None)
            weight += delta
            self._original_weight = original

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the original weight, bit for bit."""
        if self._original_weight is not None:
            self.base_layer.weight.copy_(self._original_weight)
            self._original_weight = None
        if self._quantized:
            self.base_layer = self._quantized.pop()


class AdaptedModel(nn.Module):
    """Model with adapters in some of its linear layers.

    Attributes that it lacks are looked up in the base model.
    """

    def __init__(self, model: nn.Module, options: LoraOptions, base_name: str = "") -> None:
        super().__init__()
        check_type("model", model, nn.Module, "a torch.nn.Module", error=ConfigError)
        check_type("options", options, LoraOptions, "LoraOptions", error=ConfigError)
        self.base = model
        self.options = options
        self.base_name = base_name

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # the base's __deepcopy__, for example, would drop this class
                raise
            return getattr(super().__getattr__("base"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the model."""
        return self.base(*arguments, **keywords)

    def get_base_model(self) -> nn.Module:
        """Return the base model, with the adapters in place."""
        return self.base

    def adapters(self) -> dict[str, LoraLinear]:
        """Return the adapted layers by name."""
        return {n: m for n, m in self.base.named_modules() if isinstance(m, LoraLinear)}

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable the adapters inside the `with` block.

        Raises:
            ModelError: the adapters are merged.
        """
        layers = list(self.adapters().values())
        if any(layer.merged for layer in layers):
            raise ModelError("merged adapters cannot be disabled; call unmerge() first")
        previous = [layer.enabled for layer in layers]
        for layer in layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer, enabled in zip(layers, previous, strict=True):
                layer.enabled = enabled

    def merge(self) -> None:
        """Merge all adapters into the weights."""
        for layer in self.adapters().values():
            layer.merge()

    def unmerge(self) -> None:
        """Restore the original weights, bit for bit."""
        for layer in self.adapters().values():
            layer.unmerge()

    @contextmanager
    def as_merged(self) -> Iterator[nn.Module]:
        """Yield the plain model with merged adapters inside the `with` block."""
        layers = self.adapters()
        already_merged = {name for name, layer in layers.items() if layer.merged}
        self.merge()
        for name, layer in layers.items():
            # Savers expect plain linear layers under the original names.
            _replace(self.base, name, layer.base_layer)
        try:
            yield self.base
        finally:
            for name, layer in layers.items():
                _replace(self.base, name, layer)
                if name not in already_merged:
                    layer.unmerge()

    def merged_model(self) -> nn.Module:
        """Merge the adapters and return the plain model; this object must not be used any more."""
        self.merge()
        for name, layer in self.adapters().items():
            _replace(self.base, name, layer.base_layer)
        return self.base.requires_grad_(True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the two adapter files of peft.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        check_path("folder", folder, error=WriteError, written="folder")
        weights = {name: (layer.lora_A, layer.lora_B) for name, layer in self.adapters().items()}
        save_adapters(Path(folder), self.options, weights, self.base_name)


@contextmanager
def plain_model(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a model with its adapters, ours or peft's, merged inside the `with` block."""
    if isinstance(module, AdaptedModel):
        with module.as_merged() as plain:
            yield plain
    elif hasattr(module, "merge_and_unload") and hasattr(module, "peft_config"):
        # peft merges in place and removes its layers, so a copy is merged.
        yield cast(Any, copy.deepcopy(module)).merge_and_unload()
    else:
        yield module


def merged_copy(module: nn.Module) -> nn.Module:
    """Copy a model; adapters, ours or peft's, are merged and all weights become trainable."""
    copied: Any = copy_of(module)
    if isinstance(copied, AdaptedModel):
        return copied.merged_model()
    if hasattr(copied, "merge_and_unload") and hasattr(copied, "peft_config"):
        return cast(nn.Module, copied.merge_and_unload().requires_grad_(True))
    return cast(nn.Module, copied)


def save_adapters(
    folder: Path,
    options: LoraOptions,
    weights: Mapping[str, tuple[Tensor, Tensor]],
    base_name: str = "",
) -> None:
    """Write the two adapter files of peft.

    Args:
        folder: folder to write to; created if missing.
        options: settings of the adapters.
        weights: A (r, I) and B (O, r) by layer name.
        base_name: name or folder of the base model.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    targets = options.target_modules
    config = AdapterConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        use_rslora=options.use_rslora,
        base_model_name_or_path=base_name or None,
    )
    write_adapter(folder, config, weights)


def add_lora(
    model: nn.Module, options: LoraOptions | None = None, *, seed: int = 0, base_name: str = ""
) -> AdaptedModel:
    """Freeze a model and add adapters to its linear layers, in place.

    Args:
        model: any module with linear layers, such as a model of ms-parallel or transformers.
        options: adapter settings.
        seed: seed of the initial values of A.
        base_name: name or folder of the base model, for `adapter_config.json`.

    Raises:
        ConfigError: no layer matches `target_modules`, or the rank exceeds every layer's size.
    """
    options = lora_options(options) or LoraOptions()
    check_type("model", model, nn.Module, "a torch.nn.Module", error=ConfigError)
    check_type("base_name", base_name, str, "a string", error=ConfigError)
    names = _matching(model, options.target_modules)
    _check_rank(model, names, options.rank)
    adapted = adapt(model, names, options, base_name)
    for name, layer in adapted.adapters().items():
        # The seed depends on the layer's name, so that pipeline stages get the same values.
        layer.initialize(zlib.crc32(f"{seed} {name}".encode()))
    return adapted


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model without adapters, by name."""
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise ConfigError("the model already has adapters; merge them, or train these")
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def ends_with(name: str, targets: Iterable[str]) -> bool:
    """Return True if a layer's name is a target, or ends with a dot and a target."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def adapt(model: nn.Module, names: list[str], options: LoraOptions, base: str) -> AdaptedModel:
    """Freeze a model and add adapters to the named layers, in place."""
    model.requires_grad_(False)
    for name in names:
        base_layer = cast(nn.Linear, model.get_submodule(name))
        layer = LoraLinear(base_layer, options.rank, options.scale, options.quantize_base)
        _replace(model, name, layer)
    return AdaptedModel(model, options, base)


def _matching(model: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """List the names of the linear layers that match, in the model's order."""
    linear = list(linear_layers(model))
    if targets == ALL_LINEAR:
        head = _head_name(model)
        matches = [name for name in linear if name != head]
    elif isinstance(targets, str):
        matches = [name for name in linear if re.fullmatch(targets, name)]
    else:
        matches = [name for name in linear if ends_with(name, targets)]
    if not matches:
        available = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        if any(type(module).__name__ == "Conv1D" for module in model.modules()):
            raise ConfigError(
                "lora needs torch.nn.Linear layers, and this model is built from transformers'"
                " Conv1D, as GPT-2 is; remove lora to train all weights, or use another model"
            )
        raise ConfigError(
            f"no linear layer matches target_modules {targets!r}; the model has: {available}"
        )
    return matches


def _check_rank(model: nn.Module, names: list[str], rank: int) -> None:
    """Check the rank against the adapted matrices, before memory is allocated."""
    # A matrix (O, I) has at most rank min(O, I).
    largest = max(min(cast(nn.Linear, model.get_submodule(name)).weight.shape) for name in names)
    if rank > largest:
        raise ConfigError(
            f"rank must be at most {largest}, the largest rank of the adapted layers, got {rank}; "
            "lower it"
        )


def _head_name(model: nn.Module) -> str | None:
    """Return the name of the output head, which `all-linear` excludes."""
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))()
    return next((name for name, module in model.named_modules() if module is head), None)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
