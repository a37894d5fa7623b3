"""Remove wrappers around a model or its modules that do not change results or belong in a file."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ms_compress.errors import ExportError

WRAPPED_KEYS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes in which torch.compile and activation checkpointing store the wrapped module."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without compilation, checkpointing and data parallel wrappers."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrapped(model.module)
    inner = next((model._modules[key] for key in WRAPPED_KEYS if key in model._modules), None)
    return model if inner is None else unwrapped(inner)


def bare_name(name: str) -> str:
    """Return a tensor's or module's name without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED_KEYS)


def architecture(model: nn.Module) -> str:
    """Return the class name of an unwrapped model, skipping fully_shard's generated class."""
    classes = type(model).__mro__
    return next(cls.__name__ for cls in classes if not issubclass(cls, FSDPModule))


def check_merged(model: nn.Module) -> None:
    """Check that PEFT adapters are merged, as no target reads them with quantized weights.

    Raises:
        ExportError: an adapter is not merged.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            where = f" in {name}" if name else ""
            raise ExportError(
                f"the model has a PEFT adapter{where}; export the result of"
                " model.merge_and_unload()"
            )
