"""The reference that a KL or a preference is measured against: a model, or the initial policy."""

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
    """An engine, and what must hold while it is asked."""

    engine: Engine
    while_asked: Callable[[], AbstractContextManager[Any]] = nullcontext


def reference_of(given: Any, policy: Engine, build: Callable[[Any], Engine]) -> Reference:
    """Return the reference that a setting stands for.

    Args:
        given: a model, an engine, a folder, `"adapter_off"`, or None for a copy of the policy.
        policy: as it begins.
        build: makes an engine of a model or folder.

    Raises:
        ConfigError: the policy has no adapters to switch off, or cannot be copied.
    """
    if given == ADAPTER_OFF:
        if policy.adapters is None:
            raise ConfigError(
                "reference_model is 'adapter_off' and the policy has no disable_adapter() and "
                "save_pretrained(); add adapters, or leave reference_model out for a frozen copy"
            )
        return Reference(policy, policy.adapters.disable_adapter)
    if given is not None:
        return Reference(
            build(given.requires_grad_(False) if isinstance(given, nn.Module) else given)
        )
    if not isinstance(policy, LocalEngine):
        raise ConfigError(
            "this engine's policy cannot be copied; give reference_model= an engine with the same "
            "weights, or do without a reference"
        )
    frozen_copy = copy_of(policy.module).requires_grad_(False)
    return Reference(LocalEngine(frozen_copy, microbatch_size=policy.microbatch_size))
