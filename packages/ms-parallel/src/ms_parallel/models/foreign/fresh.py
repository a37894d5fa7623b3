"""Initial values of a model of transformers, by its own rules."""

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.foreign.around import Around
from ms_parallel.models.plan import ModelPlan
from ms_parallel.torch_private import is_persistent

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
        self.parts = {
            name: module.inner if isinstance(module, Around) else module
            for name, module in model.named_modules()
        }
        self.modules = {
            name: module
            for name, module in self.parts.items()
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
        """Draw the whole of a parameter."""
        path, _, own = self.owners.get(name, name).rpartition(".")
        module = self._blank(path, "cpu")
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self.rule(module)
            if module._parameters[own].isnan().any():  # its parent's rule may draw it
                self.rule(self._parent(path, module))
        value = module._parameters[own]
        assert value is not None
        drawn: Tensor = value.detach()
        if bool(drawn.isnan().any()):
            raise ModelError(f"transformers does not say how {name!r} begins; start from a folder")
        return drawn

    def _blank(self, path: str, device: str) -> Any:
        """Copy a module with parameters of NaN, not drawn yet; its parts have no storage."""
        module, values = copy.copy(self.modules[path]), dict[str, nn.Parameter | None]()
        module.__dict__["_buffers"] = {
            each: None if buffer is None else torch.zeros_like(buffer, device=device)
            for each, buffer in module._buffers.items()
        }
        for each, found in self.shapes[path].items():
            values[each] = None
            if found is not None:
                shape, dtype = found
                values[each] = nn.Parameter(
                    torch.full(shape, torch.nan, dtype=dtype, device=device)
                )
        module.__dict__["_parameters"] = values
        return module

    def _parent(self, path: str, module: Any) -> Any:
        """Copy what a module is a part of, so that the module alone has storage in it."""
        above, dot, last = path.rpartition(".")
        parent = copy.copy(self.parts[above])
        parts = dict(parent._modules)
        for name in parts:
            if f"{above}{dot}{name}" in self.modules:
                parts[name] = self._blank(f"{above}{dot}{name}", "meta")
        parent.__dict__["_modules"] = {**parts, last: module}
        return parent

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
                computed = not is_persistent(module, name)
                known = buffer.is_meta or not buffer.is_floating_point()
                if computed and not known and bool(buffer.isnan().any()):
                    raise ModelError(
                        f"transformers does not say how {name!r} of {type(module).__name__} is"
                        " computed"
                    )
