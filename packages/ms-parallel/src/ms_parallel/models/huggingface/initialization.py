"""Initial values of a transformers model from its own `_init_weights` methods."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError
from ms_parallel.models.huggingface.config import TransformersModel, transformers
from ms_parallel.models.huggingface.constants import constant_of
from ms_parallel.models.huggingface.module_wrapper import ModuleWrapper
from ms_parallel.models.huggingface.plans import meta_model
from ms_parallel.models.plan import ModelPlan
from ms_parallel.torch_private import is_persistent

INITIALIZED_FLAG = "_is_hf_initialized"
"""Attribute on a parameter that makes transformers' `_init_weights` skip it."""


class HFInit:
    """Initializes parameters and buffers one module at a time, as transformers would.

    Random values depend only on the seed, the module's name and its unsharded shape, so they are
    the same under every layout. Only one module at a time has unsharded parameters in memory.

    Args:
        model: full model on the meta device, before any module is replaced.
        config: configuration of the model.
        plan: names the tied weights.
    """

    def __init__(self, model: Any, config: TransformersModel, plan: ModelPlan) -> None:
        self.config = config
        self.owners = {copy: owner for owner, copy in plan.tied}
        self.skeleton = meta_model(config)
        parts = {
            name: module.inner if isinstance(module, ModuleWrapper) else module
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
                param_name: None if value is None else (value.shape, value.dtype)
                for param_name, value in module._parameters.items()
            }
            for name, module in self.modules.items()
        }
        self.dtypes = {
            name: {
                buffer_name: value.dtype
                for buffer_name, value in module._buffers.items()
                if value is not None
            }
            for name, module in self.modules.items()
        }

    def rule(self, path: str) -> Callable[[nn.Module], None]:
        """Return `_init_weights` of the innermost `PreTrainedModel` that contains a module."""
        while path not in self.rules:
            path = path.rpartition(".")[0]
        return self.rules[path]

    @torch.no_grad()
    def parameter(self, name: str, seed: int) -> Tensor:
        """Return the unsharded initial value of a parameter.

        Raises:
            ModelError: neither `_init_weights` nor a constructor constant sets it.
        """
        path, _, param_name = self.owners.get(name, name).rpartition(".")
        module = self._blank(path)
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        # The caller's random state must not depend on which parameters this rank has.
        with torch.random.fork_rng(devices=[]):
            # 63 bits of the hash, not negative as a signed seed.
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            # As in transformers, outer modules run last and may overwrite inner ones.
            for outer_path, outer in self._with_ancestors(path, module):
                self.rule(outer_path)(outer)
        value = module._parameters[param_name]
        assert value is not None
        initial: Tensor = value.detach()
        if bool(initial.isnan().any()):  # NaN from `_blank`: no rule wrote to it
            return initial.fill_(self._constant(name))
        return initial

    def persistent_buffer(self, name: str, buffer: Tensor) -> Tensor:
        """Return the initial value of a persistent buffer, which checkpoints contain.

        Args:
            name: full name of the buffer.
            buffer: value after `buffers`; NaN if no rule set it.

        Raises:
            ModelError: neither `_init_weights` nor a constructor constant sets it.
        """
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            return torch.full_like(buffer, self._constant(name))
        return buffer

    def _constant(self, name: str) -> float:
        """Return the constant to which the constructor sets a parameter or buffer."""
        value = constant_of(self.config, name)
        if value is None:
            raise ModelError(
                f"transformers does not initialize {name!r}, so random initial weights are not"
                " possible; start from a folder with weights"
            )
        return value

    def _blank(self, path: str) -> Any:
        """Copy a module with NaN parameters on the CPU; its submodules stay on meta."""
        # Shallow copies: only the tables of tensors are replaced, and the model stays untouched.
        module, values = copy.copy(self.modules[path]), dict[str, nn.Parameter | None]()
        module.__dict__["_buffers"] = {
            tensor_name: None if buffer is None else torch.zeros_like(buffer, device="cpu")
            for tensor_name, buffer in module._buffers.items()
        }
        for tensor_name, shape_and_dtype in self.shapes[path].items():
            values[tensor_name] = None
            if shape_and_dtype is not None:
                shape, dtype = shape_and_dtype
                values[tensor_name] = nn.Parameter(
                    torch.full(shape, torch.nan, dtype=dtype, device="cpu")
                )
        module.__dict__["_parameters"] = values
        return module

    def _with_ancestors(self, path: str, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield a module, then a copy of each ancestor in which only that module has storage."""
        yield path, module
        while path:
            path, _, name = path.rpartition(".")
            outer = self.skeleton.get_submodule(path)
            outer = copy.copy(outer.inner if isinstance(outer, ModuleWrapper) else outer)
            outer.__dict__["_modules"] = {**outer._modules, name: module}
            module = outer
            yield path, module

    @torch.no_grad()
    def buffers(self, stage: nn.Module) -> None:
        """Initialize the buffers of an allocated stage, in place.

        Persistent buffers that no rule sets stay NaN until a checkpoint or `persistent_buffer`
        fills them.

        Raises:
            ModelError: neither a rule nor a constructor constant sets a non-persistent buffer.
        """
        parts = {
            path: part.inner if isinstance(part, ModuleWrapper) else part
            for path, part in stage.named_modules()
        }
        for path, module in parts.items():
            for name, dtype in self.dtypes.get(path, {}).items():
                if module._buffers.get(name) is not None:
                    module._buffers[name] = module._buffers[name].to(dtype)
            for parameter in module._parameters.values():
                if parameter is not None:
                    setattr(parameter, INITIALIZED_FLAG, True)  # rules below set buffers only
            for buffer in module._buffers.values():
                # NaN marks buffers that no rule sets.
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
        """Initialize a buffer that its module's own rule did not set."""

        def is_set() -> bool:
            needs_no_value = buffer.is_meta or not buffer.is_floating_point()
            return needs_no_value or not bool(buffer.isnan().any())

        ancestor = path
        while ancestor and not is_set():  # an outer module may set it
            ancestor = ancestor.rpartition(".")[0]
            self.rule(ancestor)(parts[ancestor])
        if is_set():
            return
        value = constant_of(self.config, f"{path}.{name}")
        if value is None:
            raise ModelError(
                f"transformers' initialization does not set {name!r} of"
                f" {type(parts[path]).__name__}; train this model with transformers"
            )
        buffer.fill_(value)
