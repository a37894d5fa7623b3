"""C signatures of aclnn entry points, derived from the annotations of their Python bodies.

``aclnnAddGetWorkspaceSize(const aclTensor *self, const aclTensor *other, const aclScalar *alpha,
aclTensor *out, uint64_t *, aclOpExecutor **)`` is the body ``(Tensor, Tensor, Scalar, Tensor)``.
The kind of arguments passed by reference is checked on arrival; arguments passed by value
(`int`, `float`, ...) cannot be checked, so those annotations must be right.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import torch
from attrs import frozen
from torch import Tensor

__all__ = [
    "Byte",
    "DType",
    "Parameter",
    "Scalar",
    "Short",
    "Single",
    "entry_point",
    "parameters_of",
]

Scalar = Annotated[float, "aclScalar"]
"""A number passed as an aclScalar: int, float, bool or complex."""
Byte = Annotated[int, "int8_t"]
"""A number passed as one byte."""
Short = Annotated[int, "int"]
"""A number passed as C's int."""
Single = Annotated[float, "float"]
"""A number passed in single precision."""
DType = Annotated[torch.dtype, "aclDataType"]
"""An aclDataType."""


@frozen(kw_only=True)
class Parameter:
    """One parameter of an entry point."""

    name: str
    code: str
    """Kind of descriptor, or i, r, s for arguments passed by value."""
    c_type: str
    """C declaration of the argument."""
    optional: bool = False
    """Whether a null pointer is allowed."""
    dtype: bool = False
    """Whether the integer names a dtype."""


FORMS: dict[Any, tuple[str, str]] = {
    Tensor: ("T", "void *"),
    list[Tensor]: ("L", "void *"),
    Scalar: ("S", "void *"),
    list[Scalar]: ("C", "void *"),
    list[int]: ("I", "void *"),
    list[float]: ("F", "void *"),
    list[bool]: ("B", "void *"),
    int: ("i", "int64_t "),
    Byte: ("i", "int8_t "),
    Short: ("i", "int "),
    bool: ("i", "_Bool "),
    DType: ("i", "int32_t "),
    float: ("r", "double "),
    Single: ("r", "float "),
    str: ("s", "const char *"),
}


def parameters_of(body: Callable[..., None]) -> tuple[Parameter, ...]:
    """Derive the signature of an entry point from its body's annotations."""
    hints = typing.get_type_hints(body, include_extras=True)
    parameters = []
    for name in inspect.signature(body).parameters:
        form = hints[name]
        arms = typing.get_args(form)
        optional = type(None) in arms
        if optional:
            (form,) = (arm for arm in arms if arm is not type(None))
        code, c_type = FORMS[form]
        parameters.append(
            Parameter(name=name, code=code, c_type=c_type, optional=optional, dtype=form == DType)
        )
    return tuple(parameters)


def entry_point(name: str, parameters: tuple[Parameter, ...] | None) -> str:
    """Return both phases of one aclnn call in C; None for a call without a body."""
    if parameters is None:
        refuse = f'{{ return null_refuse("{name}"); }}'
        return (
            f"EXPORT int {name}GetWorkspaceSize(void) {refuse}\nEXPORT int {name}(void) {refuse}\n"
        )
    arguments = "".join(
        f"{parameter.c_type}a{index}, " for index, parameter in enumerate(parameters)
    )
    fields = {"i": "integer", "r": "real"}
    initializers = ", ".join(
        f"{{'{parameter.code}', .{fields.get(parameter.code, 'pointer')} = "
        f"{'' if parameter.code in fields else '(void *)'}a{index}}}"
        for index, parameter in enumerate(parameters)
    )
    return (
        f"EXPORT int {name}GetWorkspaceSize({arguments}uint64_t *size, void **executor) {{\n"
        f"    const struct argument args[] = {{{initializers}}};\n"
        f'    return null_prepare("{name}", {len(parameters)}, args, size, executor);\n'
        "}\n"
        f"EXPORT int {name}(void *space, uint64_t size, void *executor, void *stream) {{\n"
        f'    return null_perform("{name}", executor);\n'
        "}\n"
    )
