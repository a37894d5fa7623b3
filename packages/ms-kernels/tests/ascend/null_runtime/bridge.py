"""Convert aclnn calls from C to CPU tensors over the same memory, and run their Python bodies."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bodies import BODIES
from .errors import NullRuntimeError
from .signatures import Parameter, parameters_of

__all__ = ["Call", "attach", "record"]

DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    17: torch.complex128,
    27: torch.bfloat16,
}
"""By aclDataType."""

DIMS = 16


class _Descriptor(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("count", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * DIMS),
        ("strides", ctypes.c_int64 * DIMS),
        ("offset", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("value", ctypes.c_ubyte * 16),
    )


class _Argument(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_int64),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("pointer", ctypes.c_void_p),
    )


_Performer = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(_Argument)
)


class Call(NamedTuple):
    """One aclnn call that was performed."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Dtype and shape of each tensor, results included; lists are flattened."""


_recorders: list[list[Call]] = []
_parameters: dict[str, tuple[Parameter, ...]] = {}


@contextmanager
def record() -> Iterator[list[Call]]:
    """Collect the aclnn calls made inside the block, in order, from every thread."""
    calls: list[Call] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        _recorders.remove(calls)


def attach(library: ctypes.CDLL) -> None:
    """Let the bodies perform the calls that arrive in `library`."""

    def perform(name: bytes, count: int, args: Any) -> int:
        try:
            _perform(library, name.decode(), args[:count])
        except Exception as error:
            text = f"{name.decode()}: {type(error).__name__}: {error}"
            library.null_set_error(text.encode())
            return 1
        return 0

    callback = _Performer(perform)
    library.null_set_performer(callback)
    _callbacks.append(callback)


_callbacks: list[Any] = []
"""Functions that C holds pointers to; they must stay referenced."""


def _perform(library: ctypes.CDLL, name: str, args: list[_Argument]) -> None:
    parameters = _parameters.setdefault(name, parameters_of(BODIES[name]))
    values = [_value(library, *pair) for pair in zip(parameters, args, strict=True)]
    if _recorders:
        tensors = [
            tensor
            for value in values
            for tensor in (value if isinstance(value, list) else [value])
            if isinstance(tensor, Tensor)
        ]
        shapes = tuple((str(tensor.dtype)[6:], tuple(tensor.shape)) for tensor in tensors)
        for calls in _recorders:
            calls.append(Call(name, shapes))
    with torch.no_grad():
        BODIES[name](*values)


def _value(library: ctypes.CDLL, parameter: Parameter, arg: _Argument) -> Any:
    if parameter.code == "i":
        return DTYPES[arg.integer] if parameter.dtype else arg.integer
    if parameter.code == "r":
        return arg.real
    if not arg.pointer:
        if not parameter.optional:
            raise NullRuntimeError(f"{parameter.name} is null; it must be given")
        return None
    if parameter.code == "s":
        return ctypes.string_at(arg.pointer).decode()
    return _read(library, arg.pointer)


def _read(library: ctypes.CDLL, pointer: int) -> Any:
    """Return the value that a descriptor describes."""
    descriptor = _Descriptor.from_address(pointer)
    kind = chr(descriptor.kind)
    if kind == "T":
        return _tensor(library, descriptor)
    if kind == "S":
        return _number(descriptor)
    width = {"I": ctypes.c_int64, "F": ctypes.c_float, "B": ctypes.c_bool}.get(kind)
    items = ((width or ctypes.c_void_p) * descriptor.count).from_address(descriptor.data or 0)
    return [item if width else _read(library, item) for item in items]


def _number(descriptor: _Descriptor) -> complex | float | bool:
    value = torch.frombuffer(bytearray(descriptor.value), dtype=DTYPES[descriptor.dtype], count=1)
    number: complex | float | bool = value.item()
    return number


def _tensor(library: ctypes.CDLL, descriptor: _Descriptor) -> Tensor:
    """View device memory as a tensor on the CPU."""
    sizes, strides = descriptor.sizes[: descriptor.count], descriptor.strides[: descriptor.count]
    dtype = DTYPES.get(descriptor.dtype)
    if dtype is None:
        raise NullRuntimeError(f"a tensor of aclDataType {descriptor.dtype}, which is unknown here")
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    start = (descriptor.data or 0) + descriptor.offset * dtype.itemsize
    size_bytes = extent * dtype.itemsize
    if not library.null_owns_memory(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes)):
        raise NullRuntimeError(f"a tensor of {size_bytes} bytes that lies outside device memory")
    memory = (ctypes.c_char * size_bytes).from_address(start)
    return torch.frombuffer(memory, dtype=dtype, count=extent).as_strided(sizes, strides)
