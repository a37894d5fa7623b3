"""Reference model of a KL penalty or of DPO: a separate model or the initial policy."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from attrs import frozen
from torch import nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.models.language_model import copy_of

ADAPTER_OFF = "adapter_off"


@frozen
class Reference:
    """Reference engine, with a context manager that activates it."""

    engine: Engine
    activate: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context manager for reference passes: disables the adapters, if the policy is the reference
    with adapters."""


def reference_of(reference: Any, policy: Engine, build: Callable[[Any], Engine]) -> Reference:
    """Build the reference from a `reference_model` setting.

    Args:
        reference: a model, an engine, a folder, `"adapter_off"`, or None for a copy of the policy.
        policy: engine of the policy before training.
        build: builds an engine for a model or folder.

    Raises:
        ConfigError: the policy has no adapters to disable, or cannot be copied.
    """
    if reference == ADAPTER_OFF:
        if policy.adapters is None:
            raise ConfigError(
                "reference_model = 'adapter_off' needs a policy with disable_adapter() and "
                "save_pretrained(); add adapters, or remove reference_model to use a frozen copy"
            )
        return Reference(policy, policy.adapters.disable_adapter)
    if reference is not None:
        return Reference(
            build(
                reference.requires_grad_(False) if isinstance(reference, nn.Module) else reference
            )
        )
    if not isinstance(policy, LocalEngine):
        raise ConfigError(
            "this engine's policy cannot be copied; pass reference_model= an engine with the same "
            "weights, or train without a reference"
        )
    # The policy trains in place, so the reference needs its own copy of the weights.
    frozen_copy = copy_of(policy.module).requires_grad_(False)
    return Reference(LocalEngine(frozen_copy, microbatch_size=policy.microbatch_size))
