"""Values that a model of transformers begins with, by its own rules."""

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.foreign.around import Around
from ms_parallel.models.plan import ModelPlan

INITIALISED = "_is_hf_initialized"
"""Transformers' mark of what its rules are to leave alone."""


class Fresh:
    """Draws parameters and computes buffers, a module at a time, as transformers would.

    A draw depends on the seed, the module's name and its whole shape alone, so every layout begins
    alike. One module's parameters are held whole while it is drawn.

    Args:
        model: whole and without storage, before anything of it is replaced.
        plan: names the weights that are one.
    """

    def __init__(self, model: Any, plan: ModelPlan) -> None:
        self.rule = model._init_weights
        self.owners = {copied: owner for owner, copied in plan.tied}
        self.modules = {
            name: module.inner if isinstance(module, Around) else module
            for name, module in model.named_modules()
            if module._parameters or module._buffers
        }
        self.shapes = {
            name: {
                own: None if value is None else (value.shape, value.dtype)
                for own, value in module._parameters.items()
            }
            for name, module in self.modules.items()
        }

        self.dtypes = {
            name: {own: value.dtype for own, value in module._buffers.items() if value is not None}
            for name, module in self.modules.items()
        }

    @torch.no_grad()
    def parameter(self, name: str, seed: int) -> Tensor:
        """The whole of a parameter."""
        path, _, own = self.owners.get(name, name).rpartition(".")
        module = copy.copy(self.modules[path])
        module.__dict__["_buffers"] = {
            each: None if buffer is None else torch.zeros_like(buffer, device="cpu")
            for each, buffer in module._buffers.items()
        }
        module.__dict__["_parameters"] = {
            each: found and nn.Parameter(torch.full(found[0], torch.nan, dtype=found[1]))
            for each, found in self.shapes[path].items()
        }
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self.rule(module)
        value = module._parameters[own]
        assert value is not None
        drawn: Tensor = value.detach()
        if bool(drawn.isnan().any()):
            raise ModelError(f"transformers does not say how {name!r} begins; start from a folder")
        return drawn

    @torch.no_grad()
    def buffers(self, stage: nn.Module) -> None:
        """Compute the buffers of a stage that was allocated, whose names are the model's."""
        for path, part in stage.named_modules():
            module = part.inner if isinstance(part, Around) else part
            for name, dtype in self.dtypes.get(path, {}).items():
                if module._buffers.get(name) is not None:
                    module._buffers[name] = module._buffers[name].to(dtype)
            buffers = {name: b for name, b in module._buffers.items() if b is not None}
            if not buffers:
                continue
            for parameter in module._parameters.values():
                if parameter is not None:
                    setattr(parameter, INITIALISED, True)
            for buffer in buffers.values():
                if buffer.is_floating_point():
                    buffer.fill_(torch.nan)
            self.rule(module)
            for name, buffer in buffers.items():
                computed = name in module._non_persistent_buffers_set
                if computed and buffer.is_floating_point() and bool(buffer.isnan().any()):
                    raise ModelError(
                        f"transformers does not say how {name!r} of {type(module).__name__} is"
                        " computed"
                    )
