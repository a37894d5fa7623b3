"""Elementwise calls, with and without a scalar, in place and not."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..signatures import Scalar

__all__ = ["BODIES"]

BODIES: dict[str, Callable[..., None]] = {}

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "BitwiseNot": torch.bitwise_not,
    "Cos": torch.cos,
    "Exp": torch.exp,
    "IsFinite": torch.isfinite,
    "Log": torch.log,
    "LogicalNot": torch.logical_not,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Silu": F.silu,
    "Sin": torch.sin,
    "Sqrt": torch.sqrt,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "BitwiseAndTensor": torch.bitwise_and,
    "BitwiseOrTensor": torch.bitwise_or,
    "BitwiseXorTensor": torch.bitwise_xor,
    "Div": torch.true_divide,
    "EqTensor": torch.eq,
    "FloorDivide": torch.floor_divide,
    "GeTensor": torch.ge,
    "GtTensor": torch.gt,
    "LeTensor": torch.le,
    "LeftShift": torch.bitwise_left_shift,
    "LogicalAnd": torch.logical_and,
    "LtTensor": torch.lt,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mul": torch.mul,
    "NeTensor": torch.ne,
    "RightShift": torch.bitwise_right_shift,
    "XLogYTensor": torch.xlogy,
}
WITH_SCALAR: dict[str, Callable[[Tensor, float], Tensor]] = {
    "BitwiseAndScalar": torch.bitwise_and,
    "BitwiseXorScalar": torch.bitwise_xor,
    "Divs": torch.true_divide,
    "EqScalar": torch.eq,
    "FloorDivides": torch.floor_divide,
    "GeScalar": torch.ge,
    "GtScalar": torch.gt,
    "LeScalar": torch.le,
    "LeftShifts": torch.bitwise_left_shift,
    "LtScalar": torch.lt,
    "Muls": torch.mul,
    "NeScalar": torch.ne,
    "PowTensorScalar": torch.pow,
}


def _unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    def body(x: Tensor, out: Tensor) -> None:
        out.copy_(function(x))

    def in_place(x: Tensor) -> None:
        x.copy_(function(x))

    BODIES[f"aclnn{name}"] = body
    BODIES[f"aclnnInplace{name}"] = in_place


def _binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def body(x: Tensor, other: Tensor, out: Tensor) -> None:
        out.copy_(function(x, other))

    def in_place(x: Tensor, other: Tensor) -> None:
        x.copy_(function(x, other))

    BODIES[f"aclnn{name}"] = body
    BODIES[f"aclnnInplace{name}"] = in_place


def _with_scalar(name: str, function: Callable[[Tensor, float], Tensor]) -> None:
    def body(x: Tensor, other: Scalar, out: Tensor) -> None:
        out.copy_(function(x, other))

    def in_place(x: Tensor, other: Scalar) -> None:
        x.copy_(function(x, other))

    BODIES[f"aclnn{name}"] = body
    BODIES[f"aclnnInplace{name}"] = in_place


for _name, _unary_function in UNARY.items():
    _unary(_name, _unary_function)
for _name, _binary_function in BINARY.items():
    _binary(_name, _binary_function)
for _name, _scalar_function in WITH_SCALAR.items():
    _with_scalar(_name, _scalar_function)


def add(x: Tensor, other: Tensor, alpha: Scalar, out: Tensor) -> None:
    """``x + alpha * other``."""
    out.copy_(torch.add(x, other, alpha=alpha))


def add_(x: Tensor, other: Tensor, alpha: Scalar) -> None:
    """``x + alpha * other``, in place."""
    x.copy_(torch.add(x, other, alpha=alpha))


def adds(x: Tensor, other: Scalar, alpha: Scalar, out: Tensor) -> None:
    """``x + alpha * other``."""
    out.copy_(torch.add(x, other, alpha=alpha))


def adds_(x: Tensor, other: Scalar, alpha: Scalar) -> None:
    """``x + alpha * other``, in place."""
    x.copy_(torch.add(x, other, alpha=alpha))


def sub(x: Tensor, other: Tensor, alpha: Scalar, out: Tensor) -> None:
    """``x - alpha * other``."""
    out.copy_(torch.sub(x, other, alpha=alpha))


def sub_(x: Tensor, other: Tensor, alpha: Scalar) -> None:
    """``x - alpha * other``, in place."""
    x.copy_(torch.sub(x, other, alpha=alpha))


def subs(x: Tensor, other: Scalar, alpha: Scalar, out: Tensor) -> None:
    """``x - alpha * other``."""
    out.copy_(torch.sub(x, other, alpha=alpha))


def rsubs(x: Tensor, other: Scalar, alpha: Scalar, out: Tensor) -> None:
    """``other - alpha * x``."""
    out.copy_(torch.rsub(x, other, alpha=alpha))


def pow_scalar_tensor(base: Scalar, exponent: Tensor, out: Tensor) -> None:
    """``base ** exponent``."""
    out.copy_(torch.pow(base, exponent))


def addcdiv(x: Tensor, numerator: Tensor, denominator: Tensor, value: Scalar, out: Tensor) -> None:
    """``x + value * numerator / denominator``."""
    out.copy_(torch.addcdiv(x, numerator, denominator, value=value))


def addcmul(x: Tensor, first: Tensor, second: Tensor, value: Scalar, out: Tensor) -> None:
    """``x + value * first * second``."""
    out.copy_(torch.addcmul(x, first, second, value=value))


def addcdiv_(x: Tensor, numerator: Tensor, denominator: Tensor, value: Scalar) -> None:
    """``x + value * numerator / denominator``, in place."""
    x.copy_(torch.addcdiv(x, numerator, denominator, value=value))


def addcmul_(x: Tensor, first: Tensor, second: Tensor, value: Scalar) -> None:
    """``x + value * first * second``, in place."""
    x.copy_(torch.addcmul(x, first, second, value=value))


def silu_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    """The gradient of SiLU."""
    wide, gate = grad.float(), torch.sigmoid(x.float())
    out.copy_(wide * gate * (1 + x.float() * (1 - gate)))


def sigmoid_backward(grad: Tensor, result: Tensor, out: Tensor) -> None:
    """The gradient of the sigmoid function, from its result."""
    out.copy_(grad * result * (1 - result))


def where(condition: Tensor, x: Tensor, other: Tensor, out: Tensor) -> None:
    """`x` where the condition holds, `other` elsewhere."""
    out.copy_(torch.where(condition.bool(), x, other))


def clamp(x: Tensor, low: Scalar | None, high: Scalar | None, out: Tensor) -> None:
    """Values clamped to optional lower and upper limits."""
    out.copy_(torch.clamp(x, low, high))


def copy_(to: Tensor, x: Tensor) -> None:
    """A copy that may change dtype and strides."""
    to.copy_(x)


def lerps_(x: Tensor, end: Tensor, weight: Scalar) -> None:
    """Linear interpolation towards `end`, in place."""
    x.lerp_(end, weight)


def one_(x: Tensor) -> None:
    """Fill with ones."""
    x.fill_(1)


def zero_(x: Tensor) -> None:
    """Fill with zeros."""
    x.zero_()


def fill_(x: Tensor, value: Scalar) -> None:
    """Fill with one value."""
    x.fill_(value)


def masked_fill_(x: Tensor, mask: Tensor, value: Scalar) -> None:
    """Fill with one value where the mask is set."""
    x.masked_fill_(mask.bool(), value)


BODIES |= {
    "aclnnAdd": add,
    "aclnnAddcdiv": addcdiv,
    "aclnnAddcmul": addcmul,
    "aclnnAdds": adds,
    "aclnnClamp": clamp,
    "aclnnInplaceAdd": add_,
    "aclnnInplaceAddcdiv": addcdiv_,
    "aclnnInplaceAddcmul": addcmul_,
    "aclnnInplaceAdds": adds_,
    "aclnnInplaceCopy": copy_,
    "aclnnInplaceFillScalar": fill_,
    "aclnnInplaceMaskedFillScalar": masked_fill_,
    "aclnnInplaceLerps": lerps_,
    "aclnnInplaceOne": one_,
    "aclnnInplaceSub": sub_,
    "aclnnInplaceZero": zero_,
    "aclnnPowScalarTensor": pow_scalar_tensor,
    "aclnnRsubs": rsubs,
    "aclnnSWhere": where,
    "aclnnSigmoidBackward": sigmoid_backward,
    "aclnnSiluBackward": silu_backward,
    "aclnnSub": sub,
    "aclnnSubs": subs,
}
