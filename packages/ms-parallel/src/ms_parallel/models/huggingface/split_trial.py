"""Trial of a transformers model's tensor-parallel plan on a small model.

A plan names the layers to split but not the operations between them. An operation over all
features, such as the activation cutoff of Gemma 3n, would see only its own shard on each tensor
rank, and the result would be wrong.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import LayoutError
from ms_parallel.models.huggingface.config import TransformersModel
from ms_parallel.models.huggingface.plans import plan_of
from ms_parallel.models.huggingface.trial import run_small_model
from ms_parallel.models.plan import ModelPlan

TOLERANCE = 1e-6
"""Relative tolerance: a matrix product may round differently when other rows change."""


@lru_cache(maxsize=64)
def check_tensor_split(config: TransformersModel) -> None:
    """Check that operations between split layers act on each feature separately.

    In each module the weights behind the second half of the column-parallel output features are
    perturbed. The first half of the row-parallel layer's input must not change.

    Passes if transformers cannot run a small model with these settings.

    Raises:
        LayoutError: a module has an operation over all features.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        trial = run_small_model(config)
        if trial is None:
            return
        small, model, tokens, _ = trial
        modules = list(_split_modules(model, plan_of(small)))
        hooks = [module.record_call() for module in modules]
        model(tokens, use_cache=False)
        for hook in hooks:
            hook.remove()
        for module in modules:
            if module.reads_all_features():
                raise LayoutError(
                    f"the tensor axis cannot split {config.model_type}:"
                    f" {type(module.module).__name__} has an operation over all features between"
                    " split layers; set tensor=1"
                )


def _split_modules(model: nn.Module, plan: ModelPlan) -> Iterator["_SplitModule"]:
    """Yield all modules with column-parallel children and one row-parallel child."""
    parameters = dict(model.named_parameters())
    for name, module in model.named_modules():
        styles = {
            child_name: plan.style(weight)
            for child_name, child in module.named_children()
            if isinstance(child, nn.Linear)
            and (weight := f"{name}.{child_name}.weight") in parameters
        }
        columns = [child_name for child_name, style in styles.items() if style == "column"]
        rows = [child_name for child_name, style in styles.items() if style == "row"]
        if columns and len(rows) == 1:
            yield _SplitModule(module, columns, rows[0])


class _SplitModule:
    """Module whose column-parallel layers feed a row-parallel layer.

    Args:
        module: the parent of these layers.
        columns: names of column-parallel children.
        row: name of the row-parallel child.
    """

    def __init__(self, module: nn.Module, columns: list[str], row: str) -> None:
        self.module = module
        self.columns: list[Any] = [module.get_submodule(name) for name in columns]
        self.row = module.get_submodule(row)
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def record_call(self) -> Any:
        """Record the arguments of the module's next call; return the hook."""

        def record(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.call = args, dict(named)

        return self.module.register_forward_pre_hook(record, with_kwargs=True)

    def reads_all_features(self) -> bool:
        """Whether the first half of the row-parallel input depends on weights of the second."""
        if self.call is None:
            return False
        before = self._row_input()
        for layer in self.columns:
            half = layer.weight.shape[0] // 2
            # Output features are rows of the weight.
            layer.weight[half:].add_(torch.randn_like(layer.weight[half:]))
        after = self._row_input()
        half = before.shape[-1] // 2
        difference = float((after - before)[..., :half].abs().max())
        # Also true for NaN.
        return not difference <= TOLERANCE * max(1.0, float(before.abs().max()))

    def _row_input(self) -> Tensor:
        """Call the module again and return the input of its row-parallel layer."""
        inputs: list[Tensor] = []
        hook = self.row.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        args, named = self.call or ((), {})
        self.module(*args, **named)
        hook.remove()
        return inputs[0].clone()
