"""LoRA adapters for the linear layers and experts of any model, compatible with peft's files."""

import copy
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ms_align.arguments import check_type
from ms_align.errors import ConfigError, ModelError, WriteError
from ms_align.files.untrusted import check_path
from ms_align.lora.adapter_file import AdapterConfig, Weights, write_adapter
from ms_align.lora.expert_files import PER_EXPERT, split_by_expert
from ms_align.lora.layers import (
    AdaptedLayer,
    ExpertWeight,
    LoraExperts,
    LoraGroupedLinear,
    LoraLinear,
    is_grouped_linear,
    stacked_weights,
)
from ms_align.lora.options import ALL_LINEAR, LoraOptions, lora_options
from ms_align.models.language_model import copy_of


class AdaptedModel(nn.Module):
    """Model with adapters in some of its layers.

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

    def adapters(self) -> dict[str, LoraLinear | LoraGroupedLinear]:
        """Return the adapted layers by name; an expert weight's name ends with its parameter."""
        return {
            name: module
            for name, module in self.base.named_modules()
            if isinstance(module, LoraLinear | LoraGroupedLinear)
        }

    @contextmanager
    def dropout(self, seed: int) -> Iterator[None]:
        """Apply dropout to the inputs of adapters inside the `with` block.

        Args:
            seed: random seed; the same seed gives the same masks.
        """
        layers = self.adapters() if self.options.dropout else {}
        for name, layer in layers.items():
            generator = torch.Generator(layer.lora_A.device)
            layer.dropout_generator = generator.manual_seed(_seed(seed, name))
        try:
            yield
        finally:
            for layer in layers.values():
                layer.dropout_generator = None

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
        already_merged = {name for name, layer in self.adapters().items() if layer.merged}
        self.merge()
        wrappers = self._wrappers()
        for name, module in wrappers.items():
            # Savers expect plain layers under the original names.
            _replace(self.base, name, module.base_layer)
        try:
            yield self.base
        finally:
            for name, module in wrappers.items():
                _replace(self.base, name, module)
            for name, layer in self.adapters().items():
                if name not in already_merged:
                    layer.unmerge()

    def merged_model(self) -> nn.Module:
        """Merge the adapters and return the plain model; this object must not be used any more."""
        self.merge()
        for name, module in self._wrappers().items():
            _replace(self.base, name, module.base_layer)
        return self.base.requires_grad_(True)

    def _wrappers(self) -> dict[str, Any]:
        """Return the outermost modules that adapters have added, by name."""
        types = (AdaptedLayer, LoraExperts)
        names = [name for name, module in self.base.named_modules() if isinstance(module, types)]
        # The adapted weights of `LoraExperts` are inside it.
        return {
            name: self.base.get_submodule(name)
            for name in names
            if not any(name.startswith(f"{outer}.") for outer in names)
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the two adapter files of peft.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        check_path("folder", folder, error=WriteError, written="folder")
        weights = {name: layer.tensors() for name, layer in self.adapters().items()}
        model_type = getattr(getattr(self.base, "config", None), "model_type", "")
        save_adapters(Path(folder), self.options, weights, self.base_name, model_type)


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
    weights: Weights,
    base_name: str = "",
    model_type: str = "",
) -> None:
    """Write the two adapter files of peft.

    Args:
        folder: folder to write to; created if missing.
        options: settings of the adapters.
        weights: tensors by layer name, in the model's order.
        base_name: name or folder of the base model.
        model_type: `model_type` of the base model's config.json; it names the experts in files.

    Raises:
        CheckpointError: the folder cannot be written.
        ModelError: layers have different ranks.
    """
    linear = [name for name, adapter in weights.items() if adapter.a.ndim == 2]
    experts = [name for name in weights if name not in linear]
    targets: str | list[str] = (
        options.target_modules
        if isinstance(options.target_modules, str)
        # Only names of adapted layers: peft would match other names to experts.
        else sorted(t for t in options.target_modules if any(ends_with(n, [t]) for n in linear))
    )
    # The factors of PiSSA and OLoRA double the rank, see `AdaptedLayer.tensors`.
    rank = options.rank * (1 if options.init_lora_weights == "default" else 2)
    if any(adapter.a.shape[-2] != rank for adapter in weights.values()):
        raise ModelError(
            "layers of this adapter have different ranks, which an adapter file cannot store; "
            "save the merged model"
        )
    parameters = {name.split(".layers.")[-1].split(".", 1)[-1] for name in experts}
    alpha = options.scale * (rank**0.5 if options.use_rslora else rank)
    names = PER_EXPERT.get(model_type) if options.expert_files == "per_expert" else None
    use_rslora = options.use_rslora
    # In peft, gate and up must be the inner of two adapted weights.
    has_down = all(f"{name.rpartition('.')[0]}.down_proj" in weights for name in experts)
    if experts and has_down and names is not None:
        weights = split_by_expert(weights, names)
        # Full names, as other layers may end with the same last parts.
        targets = list(weights)
        # peft doubles rank and alpha of gate and up, which keeps alpha / rank only.
        use_rslora, alpha, parameters = False, options.scale * rank, set()
    config = AdapterConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        target_parameters=sorted(parameters) or None,
        use_rslora=use_rslora,
        use_dora=options.use_dora,
        base_model_name_or_path=base_name or None,
    )
    write_adapter(folder, config, weights)


def add_lora(
    model: nn.Module,
    options: LoraOptions | None = None,
    *,
    seed: int = 0,
    base_name: str = "",
) -> AdaptedModel:
    """Freeze a model and add adapters to its linear layers and experts, in place.

    Args:
        model: any module with linear layers, such as a model of ms-parallel or transformers.
        options: adapter settings.
        seed: seed of the initial values of A.
        base_name: name or folder of the base model, for `adapter_config.json`.

    Raises:
        ConfigError: no layer matches the targets, or the rank exceeds every layer's size.
    """
    options = lora_options(options) or LoraOptions()
    check_type("model", model, nn.Module, "a torch.nn.Module", error=ConfigError)
    check_type("base_name", base_name, str, "a string", error=ConfigError)
    return _add(model, options, seed, base_name, complete=True)


def adapt_stage(
    stage: nn.Module, options: LoraOptions, *, seed: int, complete: bool
) -> AdaptedModel:
    """Freeze a pipeline stage and add adapters to its layers.

    Args:
        stage: stage to adapt, in place.
        options: adapter settings.
        seed: seed of the initial values of A.
        complete: the stage is the complete model, so it must have all targets.
    """
    return _add(stage, options, seed, "", complete=complete)


def _add(
    model: nn.Module, options: LoraOptions, seed: int, base_name: str, *, complete: bool
) -> AdaptedModel:
    linear = _matching(model, options.target_modules, complete)
    names = [*linear, *_experts(model, options, complete)]
    if names:
        _check_rank(model, names, options)
    adapted = adapt(model, names, options, base_name)
    for name, layer in adapted.adapters().items():
        # The seed depends on the layer's name, so that pipeline stages get the same values.
        layer.initialize(_seed(seed, name))
    return adapted


def _seed(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model without adapters, by name."""
    if any(isinstance(module, AdaptedLayer) for module in model.modules()):
        raise ConfigError("the model already has adapters; merge them, or train the existing ones")
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def expert_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the stacked weights of experts, (E, ..., I), by their names in transformers."""
    weights = {}
    for name, module in model.named_modules():
        if is_grouped_linear(module):
            weights[name] = cast(Tensor, module.weight)
        for parameter in stacked_weights(module):
            weights[f"{name}.{parameter}"] = ExpertWeight(module, parameter).weight
    return weights


def ends_with(name: str, targets: Iterable[str]) -> bool:
    """Return True if a layer's name is a target, or ends with a dot and a target."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def adapt(
    model: nn.Module,
    names: Iterable[str],
    options: LoraOptions,
    base: str,
    own_options: Mapping[str, LoraOptions] | None = None,
) -> AdaptedModel:
    """Freeze a model and add adapters to the named layers and expert weights, in place.

    Args:
        model: base model.
        names: layers to adapt.
        options: adapter settings.
        base: name or folder of the base model.
        own_options: settings of some layers, by name, instead of `options`.
    """
    model.requires_grad_(False)
    linear = linear_layers(model)
    for name in names:
        parent_name, _, last = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        settings = (own_options or {}).get(name, options)
        if name in linear:
            layer: nn.Module = LoraLinear(linear[name], settings)
        elif not stacked_weights(parent) and not isinstance(parent, LoraExperts):
            layer = LoraGroupedLinear(model.get_submodule(name), settings)
        else:
            if not isinstance(parent, LoraExperts):
                parent = LoraExperts(parent)
                _replace(model, parent_name, parent)
            layer = LoraGroupedLinear(parent.get_submodule(last), settings)
        _replace(model, name, layer)
    return AdaptedModel(model, options, base)


def _experts(model: nn.Module, options: LoraOptions, complete: bool) -> list[str]:
    """List the names of the expert weights that match `target_parameters`, in the model's order."""
    targets = options.target_parameters
    weights = expert_weights(model) if targets else {}
    for target in targets:
        if complete and not any(ends_with(name, (target,)) for name in weights):
            available = ", ".join(sorted({".".join(n.split(".")[-2:]) for n in weights})) or "none"
            raise ConfigError(
                f"target_parameters must name expert weights, got {target!r}; the model has: "
                f"{available}"
            )
    return [name for name in weights if ends_with(name, targets)]


def _matching(model: nn.Module, targets: str | tuple[str, ...], complete: bool) -> list[str]:
    """List the names of the linear layers that match, in the model's order."""
    linear = list(linear_layers(model))
    if not targets:
        return []
    if targets == ALL_LINEAR:
        head = _head_name(model)
        matches = [name for name in linear if name != head]
    elif isinstance(targets, str):
        matches = [name for name in linear if re.fullmatch(targets, name)]
    else:
        matches = [name for name in linear if ends_with(name, targets)]
    if not matches and complete:
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


def _check_rank(model: nn.Module, names: list[str], options: LoraOptions) -> None:
    """Check the rank against the adapted matrices, before memory is allocated."""
    linear, experts = linear_layers(model), expert_weights(model)
    # A matrix (O, I) has at most rank min(O, I).
    ranks = [
        min(linear[name].weight.shape)
        if name in linear
        else min(experts[name].shape[1:-1].numel(), experts[name].shape[-1])
        for name in names
    ]
    # The factors of a weight have at most its rank.
    largest = max(ranks) if options.init_lora_weights == "default" else min(ranks)
    if options.rank > largest:
        raise ConfigError(
            f"rank must be at most {largest}, the largest rank of the adapted layers, got "
            f"{options.rank}; lower it"
        )


def _head_name(model: nn.Module) -> str | None:
    """Return the name of the output head, which `all-linear` excludes."""
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))()
    return next((name for name, module in model.named_modules() if module is head), None)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
