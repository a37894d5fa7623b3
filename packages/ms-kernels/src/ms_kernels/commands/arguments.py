"""Reads the command's arguments: operators, backends, dtypes, devices, sizes and options.

Each raises a `KernelError` that says what would fit.
"""

import ast
from collections.abc import Sequence
from typing import Final

import torch

from ms_kernels.contracts.call import FLOATING, describe
from ms_kernels.contracts.contract import Contract
from ms_kernels.errors import ArgumentError, BackendError, shown

MOST: Final = 2**31 - 1
"""Largest size that `explain` takes."""


def read_details(
    contract: Contract, details: Sequence[str]
) -> tuple[dict[str, int], dict[str, object], set[str]]:
    """Sort NAME[=VALUE] into sizes, options and optional arguments."""
    sizes: dict[str, int] = {}
    settings: dict[str, object] = {}
    wanted: set[str] = set()
    spare = [each.name for each in contract.arguments if each.optional]
    known = [each.name for each in contract.options]
    for detail in details:
        name, _, text = detail.partition("=")
        if name in contract.example and text.isdecimal():
            # Python makes no number of more than 4,300 digits.
            sizes[name] = int(text) if len(text) <= len(str(MOST)) else MOST + 1
            if sizes[name] > MOST:
                raise ArgumentError(contract.name, name, shown(text), f"up to {MOST}")
        elif name in known and text:
            settings[name] = _value(text)
        elif name in spare and not text:
            wanted.add(name)
        else:
            sizes_fit = ", ".join(f"{each}=SIZE" for each in contract.example)
            options_fit = ", ".join([f"{each}=VALUE" for each in known] + spare)
            fits = f"one of {sizes_fit}{', ' if options_fit else ''}{options_fit}"
            raise ArgumentError(contract.name, shown(detail), "not understood", fits)
    return sizes, settings, wanted


def _value(text: str) -> object:
    try:
        value: object = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text
    return value


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype that operators are made for."""
    found = getattr(torch, name, None)
    if found not in FLOATING:
        fits = ", ".join(describe(each) for each in FLOATING)
        raise BackendError(f"no operator is made for dtype {name!r}; there are {fits}")
    assert isinstance(found, torch.dtype)
    return found


def present(name: str) -> torch.device:
    """Return a device that this machine has."""
    device = device_of(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BackendError(f"device {device} is not available here: {reason}") from error
    return device


def device_of(name: str) -> torch.device:
    """Return a device by its name, here or not."""
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"there is no device {name!r}; there are cpu, cuda, npu") from error
    if str(found) != name:  # torch keeps eight bits of a number: cuda:300 would be cuda:44
        raise BackendError(f"there is no device {name!r}; no machine has so many")
    return found
