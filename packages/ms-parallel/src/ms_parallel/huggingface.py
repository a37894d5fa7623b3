"""Optimizers and learning-rate schedules for transformers' Trainer.

`trainer_optimizers` returns the pair for `Trainer(optimizers=...)`. It uses the engine's update
rules, so Trainer makes the same updates as `Engine`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ms_parallel.arguments import check_items, check_type
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.models.plan import ModelPlan
from ms_parallel.optim.optimizer import OptimizerConfig, learning_rate, optimizer_of
from ms_parallel.optim.rule import LocalParameters

__all__ = ["TrainerOptimizer", "trainer_optimizers"]


def trainer_optimizers(
    model: nn.Module,
    optimizer: str | Mapping[str, Any] | OptimizerConfig = "AdamW",
    *,
    total_steps: int,
    plan: ModelPlan | None = None,
    **settings: Any,
) -> tuple[Optimizer, LambdaLR]:
    """Return an optimizer and its schedule for `Trainer(optimizers=...)`.

    Trainer clips gradients itself (`TrainingArguments.max_grad_norm`); the `max_grad_norm` of the
    settings is not used.

    Args:
        model: model to train; frozen parameters are skipped.
        optimizer: `AdamW`, `SGD`, `Adafactor`, `Muon` or an elementwise class of torch.optim; or a
            table of its `name` and settings; or an object such as `AdamWConfig`.
        total_steps: number of optimizer steps, at which the decay ends.
        plan: names the blocks whose matrices Muon updates. None: `model.layers.*`.
        settings: `learning_rate`, `warmup_steps`, `decay`, `final_ratio`, `weight_decay`.

    Raises:
        ConfigError: a setting is unknown or invalid, or the model has no trainable parameters.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=ConfigError)
    check_type("plan", plan, ModelPlan, "a ModelPlan", error=ConfigError, optional=True)
    if isinstance(optimizer, OptimizerConfig):
        if settings:
            raise ConfigError("settings must be part of the optimizer object; set them there")
        config = optimizer
    else:
        config = optimizer_of(optimizer, decay_steps=total_steps, **settings)
    if config.decay_steps is None:
        config = evolve(config, decay_steps=total_steps)
    parameters: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if not parameters:
        raise ConfigError("model must have trainable parameters, got none; unfreeze some")
    result = TrainerOptimizer(parameters, config, plan or ModelPlan(blocks="model.layers.*"))
    peak = config.learning_rate or 1.0
    return result, LambdaLR(result, _factor(config, peak))


def _factor(config: OptimizerConfig, peak: float) -> Callable[[int], float]:
    return lambda step: learning_rate(step, config) / peak


class TrainerOptimizer(Optimizer):
    """Update rules of the engine behind the interface of torch's optimizers.

    Args:
        parameters: parameters to update, by name, on one device.
        config: optimizer settings.
        plan: names the blocks of the model.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], config: OptimizerConfig, plan: ModelPlan
    ) -> None:
        check_type("parameters", parameters, Mapping, "parameters by name", error=ConfigError)
        check_items("parameters", parameters.values(), Tensor, "tensors", error=ConfigError)
        check_type("config", config, OptimizerConfig, "an OptimizerConfig", error=ConfigError)
        check_type("plan", plan, ModelPlan, "a ModelPlan", error=ConfigError)
        self.parameters = dict(parameters)
        self.config = config
        # `update_count` is in the group, so torch saves it with the optimizer's state. Schedulers
        # change the group's `lr`.
        params: Any = list(self.parameters.values())
        super().__init__([{"params": params, "update_count": 0}], {"lr": config.learning_rate})
        self.rules = config.rules(
            LocalParameters(
                parameters=self.parameters,
                plan=plan,
                groups=_OneProcess(params[0].device),  # type: ignore[arg-type]
                weights=dict,
            )
        )
        self._share_state()

    def _share_state(self) -> None:
        """Put the rules' own tensors into the state that torch saves."""
        # Shared, not copied: the rules update these tensors in place.
        for rule in self.rules:
            for moments in (rule.moments, rule.unsharded):
                for moment, tensors in moments.items():
                    for name, tensor in tensors.items():
                        self.state[self.parameters[name]][moment] = tensor

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters with their gradients; a missing gradient counts as zero."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters.items()
        }
        for rule in self.rules:
            rule.apply(gradients, float(group["lr"]), group["update_count"])
        group["update_count"] += 1
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore moments and the number of updates."""
        # torch replaces the state's tensors, so copy their values into the rules' tensors and put
        # those back.
        super().load_state_dict(state_dict)
        loaded = {parameter: dict(values) for parameter, values in self.state.items()}
        self._share_state()
        for parameter, values in loaded.items():
            for moment, value in values.items():
                self.state[parameter][moment].copy_(value)


class _OneProcess:
    """Process groups for a process with all parameters: a single process, or DDP."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return a group with only this process, which Muon's exchange of matrices needs."""
        if not dist.is_initialized():
            return connect(Layout(), device=self.device).group(axis)
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)  # type: ignore[no-any-return]
