"""Recomputes blocks in the backward, which keep only their input, to save memory."""

from typing import Literal

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint

from ms_parallel.errors import ConfigError
from ms_parallel.models.experts.kept import keeping
from ms_parallel.models.plan import ModelPlan

Recompute = Literal["none", "full"]


def recompute_blocks(model: nn.Module, plan: ModelPlan, recompute: Recompute) -> None:
    """Mark each block of `model`, in place; names and weights stay as they are.

    What a block decides, such as the experts of a token, is not decided again.

    Raises:
        ConfigError: `recompute` is neither "none" nor "full".
    """
    if recompute not in ("none", "full"):
        raise ConfigError(f"recompute is {recompute!r}; choose 'none' or 'full'")
    if recompute == "none":
        return
    for name, module in model.named_modules():
        if plan.is_block(name) and any(True for _ in module.parameters()):
            checkpoint(module, preserve_rng_state=False, context_fn=keeping)
