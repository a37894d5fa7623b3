"""A trial of what a module computes between layers that the tensor axis splits.

A published tensor plan names layers, not what runs between them. If that reads all features, as
the cutoff of Gemma 3n's activations does, each tensor rank computes it from its own features and
the result is wrong. So a small model is tried in one process.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import LayoutError
from ms_parallel.models.foreign.config import TransformersModel
from ms_parallel.models.foreign.plans import plan_of
from ms_parallel.models.foreign.small import small_model
from ms_parallel.models.foreign.trial import LENGTH, reference_model
from ms_parallel.models.plan import ModelPlan

TOLERANCE = 1e-6
"""Allowed difference; products over other rows of a matrix may round differently."""


@lru_cache(maxsize=64)
def check_split(config: TransformersModel) -> None:
    """Check that no tensor rank needs features of another between the layers that are split.

    The second half of the output features of column-parallel layers is changed. The first half of
    what the row-parallel layer of the same module gets must not depend on it.

    Passes where transformers itself runs no small model of these settings.

    Raises:
        LayoutError: a module computes something over all features.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            small = small_model(config)
            model = reference_model(small)
            tokens = torch.randint(0, small.vocab_size, (1, LENGTH))
            model(tokens, use_cache=False)
        except Exception:  # transformers rejects settings in many ways; nothing to compare with
            return
        trials = list(_modules(model, plan_of(small)))
        hooks = [trial.record_call() for trial in trials]
        model(tokens, use_cache=False)
        for hook in hooks:
            hook.remove()
        for trial in trials:
            if trial.reads_all_features():
                raise LayoutError(
                    f"the tensor axis cannot split {config.model_type}:"
                    f" {type(trial.module).__name__} computes something over all features between"
                    " its split layers; set tensor=1"
                )


def _modules(model: nn.Module, plan: ModelPlan) -> Iterator["_SplitModule"]:
    """Yield each module with column-parallel children and a row-parallel one."""
    parameters = dict(model.named_parameters())
    for name, module in model.named_modules():
        styles = {
            own: plan.style(weight)
            for own, child in module.named_children()
            if isinstance(child, nn.Linear) and (weight := f"{name}.{own}.weight") in parameters
        }
        columns = [own for own, style in styles.items() if style == "column"]
        rows = [own for own, style in styles.items() if style == "row"]
        if columns and len(rows) == 1:
            yield _SplitModule(module, columns, rows[0])


class _SplitModule:
    """A module whose column-parallel layers feed a row-parallel one.

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
        """Return whether the first half of the features depends on the second half."""
        if self.call is None:
            return False
        before = self._row_input()
        for layer in self.columns:
            half = layer.weight.shape[0] // 2
            layer.weight[half:].add_(torch.randn_like(layer.weight[half:]))
        after = self._row_input()
        half = before.shape[-1] // 2
        apart = float((after - before)[..., :half].abs().max())
        return not apart <= TOLERANCE * max(1.0, float(before.abs().max()))

    def _row_input(self) -> Tensor:
        """Call the module again; return what its row-parallel layer gets."""
        inputs: list[Tensor] = []
        hook = self.row.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        args, named = self.call or ((), {})
        self.module(*args, **named)
        hook.remove()
        return inputs[0].clone()
