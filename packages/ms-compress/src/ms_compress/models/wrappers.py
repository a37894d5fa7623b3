"""Wrappers around a model or its modules, which compute alike and have no place in a file."""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ms_compress.errors import ExportError

INNER = ("_orig_mod", "_checkpoint_wrapped_module")
"""Under which torch.compile and activation checkpointing hold what they wrap."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of compilation, checkpointing and data parallelism."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return unwrapped(model.module)
    inner = next((model._modules[key] for key in INNER if key in model._modules), None)
    return model if inner is None else unwrapped(inner)


def bare_name(name: str) -> str:
    """Return a tensor's or module's name without the wrappers around it."""
    return ".".join(part for part in name.split(".") if part not in INNER)


def architecture(model: nn.Module) -> str:
    """Return the name of an unwrapped model's class; fully_shard gives it one of its own."""
    kinds = type(model).__mro__
    return next(kind.__name__ for kind in kinds if not issubclass(kind, FSDPModule))


def check_merged(model: nn.Module) -> None:
    """Refuse adapters of PEFT: no target reads them beside quantised weights.

    Raises:
        ExportError: there is one.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            where = f" in {name}" if name else ""
            raise ExportError(
                f"the model has an adapter of PEFT{where}; export what model.merge_and_unload()"
                " returns"
            )
