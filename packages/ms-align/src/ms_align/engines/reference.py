"""What the KL holds a policy near: a frozen copy, another model, or the policy without adapters."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from attrs import frozen
from torch import nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.models.language_model import copy_of

__all__ = ["Reference", "reference_of"]

ADAPTER_OFF = "adapter_off"


@frozen
class Reference:
    """An engine, and what must hold while it is asked."""

    engine: Engine
    while_asked: Callable[[], AbstractContextManager[Any]] = nullcontext


def reference_of(given: Any, policy: Engine, build: Callable[[Any], Engine]) -> Reference:
    """The reference that a setting stands for.

    Args:
        given: a model, an engine, a folder, `"adapter_off"`, or None for a copy of the policy.
        policy: as it begins.
        build: makes an engine of a model or folder.

    Raises:
        ConfigError: the policy has no adapters to switch off, or cannot be copied.
    """
    module = getattr(policy, "module", None)
    if given == ADAPTER_OFF:
        if not hasattr(module, "disable_adapter"):
            raise ConfigError(
                "reference_model is 'adapter_off' and the policy has no disable_adapter(); add "
                "adapters, or leave reference_model out for a frozen copy"
            )
        return Reference(policy, cast(Any, module).disable_adapter)
    if given is not None:
        return Reference(build(_frozen(given)))
    if not isinstance(policy, LocalEngine):
        raise ConfigError(
            "kl_coeff is above 0 and this engine's policy cannot be copied; give reference_model= "
            "an engine with the same weights, or set kl_coeff to 0"
        )
    frozen_copy = copy_of(policy.module).requires_grad_(False)
    return Reference(LocalEngine(frozen_copy, microbatch_size=policy.microbatch_size))


def _frozen(given: Any) -> Any:
    return given.requires_grad_(False) if isinstance(given, nn.Module) else given
