"""Parsing of command-line values: dtypes, devices, sizes, options and optional arguments.

Invalid values raise a `KernelError` that lists the accepted ones.
"""

import ast
from collections.abc import Sequence
from typing import Final

import torch

from ms_kernels.contracts.call import FLOATING, describe
from ms_kernels.contracts.contract import Contract
from ms_kernels.errors import ArgumentError, BackendError, shown

MAX_SIZE: Final = 2**31 - 1
"""Maximum size that `explain` accepts."""


def read_details(
    contract: Contract, details: Sequence[str]
) -> tuple[dict[str, int], dict[str, object], set[str]]:
    """Parse NAME[=VALUE] arguments into sizes, option values and optional arguments."""
    sizes: dict[str, int] = {}
    settings: dict[str, object] = {}
    requested: set[str] = set()
    optional = [argument.name for argument in contract.arguments if argument.optional]
    option_names = [option.name for option in contract.options]
    for detail in details:
        name, _, text = detail.partition("=")
        if name in contract.example and text.isdecimal():
            # int() fails above 4,300 digits.
            sizes[name] = int(text) if len(text) <= len(str(MAX_SIZE)) else MAX_SIZE + 1
            if sizes[name] > MAX_SIZE:
                raise ArgumentError(contract.name, name, shown(text), f"up to {MAX_SIZE}")
        elif name in option_names and text:
            settings[name] = _value(text)
        elif name in optional and not text:
            requested.add(name)
        else:
            sizes_fit = ", ".join(f"{dim}=SIZE" for dim in contract.example)
            options_fit = ", ".join([f"{option}=VALUE" for option in option_names] + optional)
            fits = f"one of {sizes_fit}{', ' if options_fit else ''}{options_fit}"
            raise ArgumentError(contract.name, shown(detail), "not understood", fits)
    return sizes, settings, requested


def _value(text: str) -> object:
    try:
        value: object = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text
    return value


def dtype_of(name: str) -> torch.dtype:
    """Return the floating dtype with the given name."""
    dtype = getattr(torch, name, None)
    if dtype not in FLOATING:
        fits = ", ".join(describe(floating) for floating in FLOATING)
        raise BackendError(f"dtype must be one of {fits}, got {name!r}")
    assert isinstance(dtype, torch.dtype)
    return dtype


def available_device(name: str) -> torch.device:
    """Return the device with the given name, which must exist on this machine."""
    device = device_of(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BackendError(f"device {device} is not available here: {reason}") from error
    return device


def device_of(name: str) -> torch.device:
    """Return the device with the given name, which need not exist on this machine."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"device must be cpu, cuda or npu, got {name!r}") from error
    if str(device) != name:  # torch truncates the index to 8 bits: cuda:300 becomes cuda:44
        raise BackendError(f"the index of device {name!r} is too large; use a device that exists")
    return device
