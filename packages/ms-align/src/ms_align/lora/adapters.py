"""Low-rank adapters: any nn.Linear of any model, in peft's file format, in and out.

Hu et al., 2021: y = W·x + s·B·(A·x), s = alpha / rank, or alpha / √rank (Kalajdzievski, 2023). B
begins at 0, so an adapted model begins as the model it adapts. Only A and B take a gradient.
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

from ms_align.errors import ConfigError, ModelError, WriteError
from ms_align.files.untrusted import check_path
from ms_align.lora.adapter_file import LARGEST_ALPHA, AdapterConfig, write_adapter
from ms_align.models.language_model import copy_of
from ms_align.settings import flag, number, whole
from ms_align.settings.run_file import table_of

ALL_LINEAR = "all-linear"
DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _targets(value: Any) -> Any:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(
                f"targets is {value!r}, which is no regular expression ({error}); mend it, or give "
                "a list of names"
            ) from error
        return value
    if not isinstance(value, Iterable) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"targets is {value!r}; give names of layers, or a regular expression")
    return tuple(value)


@frozen(kw_only=True)
class LoraOptions:
    """Which layers are adapted, and how."""

    rank: int = field(default=8, validator=whole())
    """Rows of A, and columns of B."""
    alpha: float = field(default=16.0, validator=number(least=1e-6, most=LARGEST_ALPHA))
    """What an adapter adds is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = field(default=DEFAULT_TARGETS, converter=_targets)
    """Last parts of layers' names; a text is a regular expression for whole names, or
    `all-linear` for every linear layer but the head."""
    rslora: bool = field(default=False, validator=flag)
    """Divide alpha by the root of the rank instead."""

    @property
    def scale(self) -> float:
        """What B·A·x is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def lora_options(value: Any) -> LoraOptions | None:
    """Convert what a setting `lora` holds: options, a table of them, or None.

    Raises:
        ConfigError: it is none of these.
    """
    return None if value is None else table_of(LoraOptions, "lora")(value)


class LoraLinear(nn.Module):
    """A linear layer and its adapter.

    Args:
        base: the layer, which is frozen.
        rank: r.
        scale: what B·A·x is multiplied by.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        made: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Parameter(torch.empty((rank, base.in_features), **made))
        self.lora_B = nn.Parameter(torch.empty((base.out_features, rank), **made))
        self.initialise(0)
        self.scale = scale
        self.enabled = True
        self._before: Tensor | None = None

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw A from the uniform distribution within ±1/√I, as peft does, and set B to 0."""
        generator = torch.Generator().manual_seed(seed)
        bound = 1.0 / math.sqrt(self.in_features)
        self.lora_A.copy_(torch.rand(self.lora_A.shape, generator=generator) * 2 * bound - bound)
        self.lora_B.zero_()

    @property
    def in_features(self) -> int:
        """Inputs of the layer, I."""
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        """Outputs of the layer, O."""
        return self.base_layer.out_features

    @property
    def weight(self) -> Tensor:
        """W + s·B·A, (O, I), as whoever reads a linear layer's weight should see it."""
        if not self.enabled or self.merged:
            return self.base_layer.weight
        return self.base_layer.weight + self.delta().to(self.base_layer.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The layer's own."""
        return cast("Tensor | None", self.base_layer.bias)

    @property
    def merged(self) -> bool:
        """Whether the layer's weight holds the adapter."""
        return self._before is not None

    def delta(self) -> Tensor:
        """Compute s·B·A, (O, I)."""
        return self.scale * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer and, where it is on and not merged, its adapter, (..., I) to (..., O)."""
        y: Tensor = self.base_layer(x)
        if not self.enabled or self.merged:
            return y
        # FSDP casts the base layer under mixed precision; the adapter is outside of it, in float32.
        a, b = self.lora_A.to(x.dtype), (self.scale * self.lora_B).to(x.dtype)
        return y + F.linear(F.linear(x, a), b)

    @torch.no_grad()
    def merge(self) -> None:
        """Put the adapter into the layer's weight; the weight as it was is kept."""
        if not self.merged:
            weight, delta = self.base_layer.weight, self.delta()
            before = weight.clone()
            if isinstance(weight, DTensor):  # this rank's part of a sharded weight
                layout = weight.device_mesh, weight.placements
                delta = distribute_tensor(delta, *layout, src_data_rank=None)
            weight += delta
            self._before = before

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take it out again, bit for bit."""
        if self._before is not None:
            self.base_layer.weight.copy_(self._before)
            self._before = None


class AdaptedModel(nn.Module):
    """A model some of whose linear layers have adapters; all else is the model's own.

    Attributes that it lacks are looked up in the model.
    """

    def __init__(self, model: nn.Module, options: LoraOptions, base_name: str = "") -> None:
        super().__init__()
        self.base = model
        self.options = options
        self.base_name = base_name

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # the base's own way of copying would copy the base alone
                raise
            return getattr(super().__getattr__("base"), name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the model."""
        return self.base(*arguments, **named)

    def get_base_model(self) -> nn.Module:
        """Return the model, adapters in place."""
        return self.base

    def adapters(self) -> dict[str, LoraLinear]:
        """List the adapted layers by their names in the model."""
        return {n: m for n, m in self.base.named_modules() if isinstance(m, LoraLinear)}

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Switch the adapters off while the block runs, so that the model is as it was before.

        Raises:
            ModelError: the adapters are merged.
        """
        layers = list(self.adapters().values())
        if any(layer.merged for layer in layers):
            raise ModelError("merged adapters cannot be switched off; call unmerge() before")
        before = [layer.enabled for layer in layers]
        for layer in layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer, enabled in zip(layers, before, strict=True):
                layer.enabled = enabled

    def merge(self) -> None:
        """Put all adapters into the weights."""
        for layer in self.adapters().values():
            layer.merge()

    def unmerge(self) -> None:
        """Take them out again, bit for bit."""
        for layer in self.adapters().values():
            layer.unmerge()

    @contextmanager
    def as_merged(self) -> Iterator[nn.Module]:
        """Yield the plain model with its adapters in its weights, while the block runs."""
        layers = self.adapters()
        merged_before = {name for name, layer in layers.items() if layer.merged}
        self.merge()
        for name, layer in layers.items():
            _replace(self.base, name, layer.base_layer)
        try:
            yield self.base
        finally:
            for name, layer in layers.items():
                _replace(self.base, name, layer)
                if name not in merged_before:
                    layer.unmerge()

    def merged_model(self) -> nn.Module:
        """Merge the adapters into the model's weights and return the model; this one is spent."""
        self.merge()
        for name, layer in self.adapters().items():
            _replace(self.base, name, layer.base_layer)
        return self.base.requires_grad_(True)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors`, as peft reads them.

        Raises:
            CheckpointError: the place cannot be written.
        """
        check_path("folder", folder, error=WriteError, written="folder")
        weights = {name: (layer.lora_A, layer.lora_B) for name, layer in self.adapters().items()}
        save_adapters(Path(folder), self.options, weights, self.base_name)


@contextmanager
def plain_model(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a model with its adapters, ours or peft's, in its weights, while the block runs."""
    if isinstance(module, AdaptedModel):
        with module.as_merged() as plain:
            yield plain
    elif hasattr(module, "merge_and_unload") and hasattr(module, "peft_config"):
        yield cast(Any, copy.deepcopy(module)).merge_and_unload()
    else:
        yield module


def merged_copy(module: nn.Module) -> nn.Module:
    """Copy a model; adapters, ours or peft's, are merged, and then every weight is trained."""
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
    """Write peft's two files.

    Args:
        folder: made if missing.
        options: that the adapters were made with.
        weights: A (r, I) and B (O, r) by the layer's name in the model.
        base_name: the model's name or folder.

    Raises:
        CheckpointError: the place cannot be written.
    """
    targets = options.targets
    config = AdapterConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=targets if isinstance(targets, str) else sorted(targets),
        use_rslora=options.rslora,
        base_model_name_or_path=base_name or None,
    )
    write_adapter(folder, config, weights)


def add_lora(
    model: nn.Module, options: LoraOptions | None = None, *, seed: int = 0, base_name: str = ""
) -> AdaptedModel:
    """Freeze a model and put adapters beside its linear layers, in place.

    Args:
        model: any; a decoder of ms-parallel or a model of transformers, for example.
        options: which layers, and how.
        seed: of A's first values.
        base_name: the model's name or folder, for `adapter_config.json`.

    Raises:
        ConfigError: no layer bears a name that is asked for, or the rank is beyond every layer.
    """
    options = lora_options(options) or LoraOptions()
    names = _matching(model, options.targets)
    _check_rank(model, names, options.rank)
    adapted = adapt(model, names, options, base_name)
    for name, layer in adapted.adapters().items():
        # By its name: the same whether the model is whole or a stage of it.
        layer.initialise(zlib.crc32(f"{seed} {name}".encode()))
    return adapted


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """List the linear layers of a model without adapters, by name, in its order."""
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise ConfigError("the model has adapters already; merge them, or go on with them")
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def ends_with(name: str, targets: Iterable[str]) -> bool:
    """Return whether a layer's name is one of the targets, or ends with one."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def adapt(model: nn.Module, names: list[str], options: LoraOptions, base: str) -> AdaptedModel:
    """Freeze a model and put adapters beside the named layers, in place."""
    model.requires_grad_(False)
    for name in names:
        layer = LoraLinear(cast(nn.Linear, model.get_submodule(name)), options.rank, options.scale)
        _replace(model, name, layer)
    return AdaptedModel(model, options, base)


def _matching(model: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """List the names of the linear layers that are asked for, in the model's order."""
    linear = list(linear_layers(model))
    if targets == ALL_LINEAR:
        head = _head_name(model)
        found = [name for name in linear if name != head]
    elif isinstance(targets, str):
        found = [name for name in linear if re.fullmatch(targets, name)]
    else:
        found = [name for name in linear if ends_with(name, targets)]
    if not found:
        have = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        if any(type(module).__name__ == "Conv1D" for module in model.modules()):
            raise ConfigError(
                "lora needs torch.nn.Linear layers, and this model is built from transformers'"
                " Conv1D, as GPT-2 is; remove lora to train all weights, or use another model"
            )
        raise ConfigError(f"no linear layer matches targets {targets!r}; the model has: {have}")
    return found


def _check_rank(model: nn.Module, names: list[str], rank: int) -> None:
    """Refuse a rank that no adapted matrix has, before memory is taken for it."""
    most = max(min(cast(nn.Linear, model.get_submodule(name)).weight.shape) for name in names)
    if rank > most:
        raise ConfigError(
            f"rank is {rank} and no layer that is adapted has more than {most} rows or columns; "
            f"give at most {most}"
        )


def _head_name(model: nn.Module) -> str | None:
    """Find the name of the layer that makes logits, which `all-linear` leaves out."""
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))()
    return next((name for name, module in model.named_modules() if module is head), None)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
