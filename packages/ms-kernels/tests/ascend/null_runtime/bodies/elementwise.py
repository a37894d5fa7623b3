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
    def body(given: Tensor, out: Tensor) -> None:
        out.copy_(function(given))

    def in_place(given: Tensor) -> None:
        given.copy_(function(given))

    BODIES[f"aclnn{name}"] = body
    BODIES[f"aclnnInplace{name}"] = in_place


def _binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def body(one: Tensor, other: Tensor, out: Tensor) -> None:
        out.copy_(function(one, other))

    def in_place(one: Tensor, other: Tensor) -> None:
        one.copy_(function(one, other))

    BODIES[f"aclnn{name}"] = body
    BODIES[f"aclnnInplace{name}"] = in_place


def _with_scalar(name: str, function: Callable[[Tensor, float], Tensor]) -> None:
    def body(one: Tensor, other: Scalar, out: Tensor) -> None:
        out.copy_(function(one, other))

    def in_place(one: Tensor, other: Scalar) -> None:
        one.copy_(function(one, other))

    BODIES[f"aclnn{name}"] = body
    BODIES[f"aclnnInplace{name}"] = in_place


for _name, _alone in UNARY.items():
    _unary(_name, _alone)
for _name, _pair in BINARY.items():
    _binary(_name, _pair)
for _name, _mixed in WITH_SCALAR.items():
    _with_scalar(_name, _mixed)


def add(one: Tensor, other: Tensor, alpha: Scalar, out: Tensor) -> None:
    """``one + alpha · other``."""
    out.copy_(torch.add(one, other, alpha=alpha))


def add_(one: Tensor, other: Tensor, alpha: Scalar) -> None:
    """The same, in place."""
    one.copy_(torch.add(one, other, alpha=alpha))


def adds(one: Tensor, other: Scalar, alpha: Scalar, out: Tensor) -> None:
    """``one + alpha · other``."""
    out.copy_(torch.add(one, other, alpha=alpha))


def adds_(one: Tensor, other: Scalar, alpha: Scalar) -> None:
    """The same, in place."""
    one.copy_(torch.add(one, other, alpha=alpha))


def sub(one: Tensor, other: Tensor, alpha: Scalar, out: Tensor) -> None:
    """``one - alpha · other``."""
    out.copy_(torch.sub(one, other, alpha=alpha))


def sub_(one: Tensor, other: Tensor, alpha: Scalar) -> None:
    """The same, in place."""
    one.copy_(torch.sub(one, other, alpha=alpha))


def subs(one: Tensor, other: Scalar, alpha: Scalar, out: Tensor) -> None:
    """``one - alpha · other``."""
    out.copy_(torch.sub(one, other, alpha=alpha))


def rsubs(one: Tensor, other: Scalar, alpha: Scalar, out: Tensor) -> None:
    """``other - alpha · one``."""
    out.copy_(torch.rsub(one, other, alpha=alpha))


def pow_scalar_tensor(base: Scalar, exponent: Tensor, out: Tensor) -> None:
    """``base ** exponent``."""
    out.copy_(torch.pow(base, exponent))


def addcdiv(one: Tensor, above: Tensor, below: Tensor, value: Scalar, out: Tensor) -> None:
    """``one + value · above / below``."""
    out.copy_(torch.addcdiv(one, above, below, value=value))


def addcmul(one: Tensor, first: Tensor, second: Tensor, value: Scalar, out: Tensor) -> None:
    """``one + value · first · second``."""
    out.copy_(torch.addcmul(one, first, second, value=value))


def addcdiv_(one: Tensor, above: Tensor, below: Tensor, value: Scalar) -> None:
    """``one + value · above / below``, in place."""
    one.copy_(torch.addcdiv(one, above, below, value=value))


def addcmul_(one: Tensor, first: Tensor, second: Tensor, value: Scalar) -> None:
    """``one + value · first · second``, in place."""
    one.copy_(torch.addcmul(one, first, second, value=value))


def silu_backward(grad: Tensor, given: Tensor, out: Tensor) -> None:
    """The gradient of SiLU."""
    wide, gate = grad.float(), torch.sigmoid(given.float())
    out.copy_(wide * gate * (1 + given.float() * (1 - gate)))


def sigmoid_backward(grad: Tensor, result: Tensor, out: Tensor) -> None:
    """The gradient of the logistic function, from its result."""
    out.copy_(grad * result * (1 - result))


def where(condition: Tensor, one: Tensor, other: Tensor, out: Tensor) -> None:
    """One or the other."""
    out.copy_(torch.where(condition.bool(), one, other))


def clamp(given: Tensor, low: Scalar | None, high: Scalar | None, out: Tensor) -> None:
    """Values between two limits, either of which may be missing."""
    out.copy_(torch.clamp(given, low, high))


def copy_(to: Tensor, given: Tensor) -> None:
    """A copy that may change dtype and strides."""
    to.copy_(given)


def lerps_(given: Tensor, end: Tensor, weight: Scalar) -> None:
    """Moved a part of the way to `end`, in place."""
    given.lerp_(end, weight)


def one_(given: Tensor) -> None:
    """Ones."""
    given.fill_(1)


def zero_(given: Tensor) -> None:
    """Zeros."""
    given.zero_()


def fill_(given: Tensor, value: Scalar) -> None:
    """One value everywhere."""
    given.fill_(value)


def masked_fill_(given: Tensor, mask: Tensor, value: Scalar) -> None:
    """One value where the mask is set."""
    given.masked_fill_(mask.bool(), value)


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
