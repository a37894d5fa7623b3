"""Initial values of a model of transformers, by its own rules."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.foreign.around import Around
from ms_parallel.models.foreign.config import TransformersModel, transformers
from ms_parallel.models.foreign.constants import constant_of
from ms_parallel.models.foreign.plans import described
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
        config: configuration of the model.
        plan: names the weights that are one.
    """

    def __init__(self, model: Any, config: TransformersModel, plan: ModelPlan) -> None:
        self.config = config
        self.owners = {copied: owner for owner, copied in plan.tied}
        self.skeleton = described(config)
        parts = {
            name: module.inner if isinstance(module, Around) else module
            for name, module in model.named_modules()
        }
        models = transformers().PreTrainedModel
        self.rules: dict[str, Callable[[nn.Module], None]] = {
            name: module._init_weights
            for name, module in parts.items()
            if isinstance(module, models)
        }
        self.modules = {
            name: module for name, module in parts.items() if module._parameters or module._buffers
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

    def rule(self, path: str) -> Callable[[nn.Module], None]:
        """Return the rule of the innermost model that a module is in, which transformers asks."""
        while path not in self.rules:
            path = path.rpartition(".")[0]
        return self.rules[path]

    @torch.no_grad()
    def parameter(self, name: str, seed: int) -> Tensor:
        """Draw the whole of a parameter.

        Raises:
            ModelError: no rule sets it, and the constructor does not set it to a constant.
        """
        path, _, own = self.owners.get(name, name).rpartition(".")
        module = self._blank(path)
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            # As in transformers, a module further out has the last word.
            for outer, part in self._with_ancestors(path, module):
                self.rule(outer)(part)
        value = module._parameters[own]
        assert value is not None
        drawn: Tensor = value.detach()
        if bool(drawn.isnan().any()):
            return drawn.fill_(self._constant(name))
        return drawn

    def persistent_buffer(self, name: str, buffer: Tensor) -> Tensor:
        """Return the fresh value of a buffer that folders hold.

        Args:
            name: full name of the buffer.
            buffer: the buffer after `buffers`: NaN where no rule sets it.

        Raises:
            ModelError: no rule sets it, and the constructor does not set it to a constant.
        """
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            return torch.full_like(buffer, self._constant(name))
        return buffer

    def _constant(self, name: str) -> float:
        """Return the constant that the constructor sets a parameter or buffer to."""
        value = constant_of(self.config, name)
        if value is None:
            raise ModelError(
                f"fresh weights need an initial value for {name!r}, which transformers'"
                " initialization does not set; start from a folder with weights"
            )
        return value

    def _blank(self, path: str) -> Any:
        """Copy a module with parameters of NaN, not drawn yet; its parts have no storage."""
        module, values = copy.copy(self.modules[path]), dict[str, nn.Parameter | None]()
        module.__dict__["_buffers"] = {
            each: None if buffer is None else torch.zeros_like(buffer, device="cpu")
            for each, buffer in module._buffers.items()
        }
        for each, found in self.shapes[path].items():
            values[each] = None
            if found is not None:
                shape, dtype = found
                values[each] = nn.Parameter(torch.full(shape, torch.nan, dtype=dtype, device="cpu"))
        module.__dict__["_parameters"] = values
        return module

    def _with_ancestors(self, path: str, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield a module and copies of all that contain it, in which it alone has storage."""
        yield path, module
        while path:
            path, _, name = path.rpartition(".")
            outer = self.skeleton.get_submodule(path)
            outer = copy.copy(outer.inner if isinstance(outer, Around) else outer)
            outer.__dict__["_modules"] = {**outer._modules, name: module}
            module = outer
            yield path, module

    @torch.no_grad()
    def buffers(self, stage: nn.Module) -> None:
        """Compute the buffers of a stage that was allocated, whose names are the model's.

        Persistent buffers that no rule sets stay NaN; a folder or `persistent_buffer` fills them.

        Raises:
            ModelError: neither a rule nor the constructor says how another buffer is computed.
        """
        parts = {
            path: part.inner if isinstance(part, Around) else part
            for path, part in stage.named_modules()
        }
        for path, module in parts.items():
            for name, dtype in self.dtypes.get(path, {}).items():
                if module._buffers.get(name) is not None:
                    module._buffers[name] = module._buffers[name].to(dtype)
            for parameter in module._parameters.values():
                if parameter is not None:
                    setattr(parameter, INITIALISED, True)  # rules below are for buffers alone
            for buffer in module._buffers.values():
                if buffer is not None and buffer.is_floating_point():
                    buffer.fill_(torch.nan)
        for path, module in parts.items():
            if any(buffer is not None for buffer in module._buffers.values()):
                self.rule(path)(module)
        for path, module in parts.items():
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_persistent(module, name):
                    self._complete(parts, path, name, buffer)

    def _complete(
        self, parts: Mapping[str, nn.Module], path: str, name: str, buffer: Tensor
    ) -> None:
        """Compute a buffer that the rule of its module did not set."""

        def is_set() -> bool:
            known = buffer.is_meta or not buffer.is_floating_point()
            return known or not bool(buffer.isnan().any())

        above = path
        while above and not is_set():  # the rule of a module further out may set it
            above = above.rpartition(".")[0]
            self.rule(above)(parts[above])
        if is_set():
            return
        value = constant_of(self.config, f"{path}.{name}")
        if value is None:
            raise ModelError(
                f"transformers' initialization does not set {name!r} of"
                f" {type(parts[path]).__name__}; train this model with transformers"
            )
        buffer.fill_(value)
