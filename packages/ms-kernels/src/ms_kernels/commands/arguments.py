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

MOST: Final = 2**31 - 1
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
            sizes[name] = int(text) if len(text) <= len(str(MOST)) else MOST + 1
            if sizes[name] > MOST:
                raise ArgumentError(contract.name, name, shown(text), f"up to {MOST}")
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
    found = getattr(torch, name, None)
    if found not in FLOATING:
        fits = ", ".join(describe(dtype) for dtype in FLOATING)
        raise BackendError(f"no operator is made for dtype {name!r}; there are {fits}")
    assert isinstance(found, torch.dtype)
    return found


def present(name: str) -> torch.device:
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
        raise BackendError(f"there is no device {name!r}; there are cpu, cuda, npu") from error
    if str(device) != name:  # torch truncates the index to 8 bits: cuda:300 becomes cuda:44
        raise BackendError(f"there is no device {name!r}; no machine has so many")
    return device
