"""Linear layers with float8 matrix products.

A linear layer computes three products that sum over different dims:

    Y = X Wᵀ      over inputs
    dX = dY W     over outputs
    dW = dYᵀ X    over tokens

Both factors are rounded to e4m3 with scales along the summed dim, and sums are float32. GPUs of
compute capability 9.0 and later multiply float8 with scales per row. Elsewhere the rounded factors
are multiplied in float32, with the same result up to the order of sums. Weights, gradients and
optimizer state keep their precision. dW sums over the tokens of a microbatch on one rank, so within
float8's rounding it depends on the microbatch size and the layout.

Shapes: T tokens, I inputs, O outputs.
"""

import logging
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from ms_parallel.errors import ConfigError
from ms_parallel.models.plan import ModelPlan
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.split.precision_choice import Float8

logger = logging.getLogger(__name__)

E4M3: Final = torch.float8_e4m3fn
MAX_E4M3: Final = 448.0
"""Largest e4m3 number."""
MIN_BLOCK_MAXIMUM: Final = 1e-12
"""Lower limit of a block's maximum, so that zeros have a finite scale."""
MULTIPLE: Final = 16
"""Sizes of float8 products must be multiples of this on a GPU."""


@frozen(kw_only=True)
class Scaling:
    """How the elements of a matrix share scales."""

    rows: int = 1
    """Rows that share a scale."""
    columns: int | None = None
    """Elements of a row that share a scale; None for the whole row."""
    power_of_two: bool = False
    """Round scales up to a power of two, so that scaling itself is exact."""
    saturates: bool = False
    """Take the power of two of the maximum's exponent, as OCP's formats do: the largest elements
    may exceed e4m3's range and are set to its largest number."""


@frozen(kw_only=True)
class Recipe:
    """Scaling of activations and gradients, and of weights."""

    activation: Scaling
    weight: Scaling
    on_gpu: bool = False
    """Whether torch has a GPU kernel for this scaling."""


RECIPES: Final[dict[Float8, Recipe]] = {
    "rowwise": Recipe(
        activation=Scaling(power_of_two=True), weight=Scaling(power_of_two=True), on_gpu=True
    ),
    "blockwise": Recipe(activation=Scaling(columns=128), weight=Scaling(rows=128, columns=128)),
    "mxfp8": Recipe(
        activation=Scaling(columns=32, power_of_two=True, saturates=True),
        weight=Scaling(columns=32, power_of_two=True, saturates=True),
    ),
}


class ScaledMatrix(NamedTuple):
    """A matrix (M, K) as e4m3 codes and float32 scales."""

    codes: Tensor
    """(M, K) float8_e4m3fn."""
    scales: Tensor
    """(M / rows, K / columns) float32, rounded up."""
    scaling: Scaling


def to_float8(matrix: Tensor, scaling: Scaling) -> ScaledMatrix:
    """Round a matrix (M, K), where a product sums over K. Infinity becomes NaN."""
    height, width = matrix.shape
    columns = scaling.columns or width
    # Pad the last blocks with zeros, which do not change a block's maximum.
    padded = F.pad(matrix.float(), (0, -width % columns, 0, -height % scaling.rows))
    # (M / rows, rows, K / columns, columns)
    blocks = padded.view(-1, scaling.rows, padded.shape[1] // columns, columns)
    scales = _scales(blocks.abs().amax((1, 3)), scaling)  # (M / rows, K / columns)
    # e4m3 has no infinity, and a cast of larger numbers gives NaN: clamp first.
    scaled = (blocks / scales[:, None, :, None]).clamp(-MAX_E4M3, MAX_E4M3)
    codes = scaled.to(E4M3).flatten(2).flatten(0, 1)[:height, :width]  # (M, K)
    return ScaledMatrix(codes, scales, scaling)


def to_float32(matrix: ScaledMatrix) -> Tensor:
    """Dequantize to (M, K) float32."""
    codes, scales, scaling = matrix
    height, width = codes.shape
    by_row = scales.repeat_interleave(scaling.rows, 0)[:height]  # (M, K / columns)
    return codes.float() * by_row.repeat_interleave(scaling.columns or width, 1)[:, :width]


def _scales(maxima: Tensor, scaling: Scaling) -> Tensor:
    """Return each block's float32 scale, from its largest absolute value."""
    maxima = maxima.clamp_min(MIN_BLOCK_MAXIMUM)
    if not scaling.power_of_two:
        return maxima / MAX_E4M3
    if scaling.saturates:
        # maximum = m · 2^e with m in [0.5, 1); e4m3's largest exponent is 8.
        exponent = torch.frexp(maxima).exponent - 1 - 8
    else:
        # Round up to a power of two; a mantissa of 0.5 is already one.
        mantissa, exponent = torch.frexp(maxima / MAX_E4M3)
        exponent = exponent - (mantissa == 0.5).int()
    power = torch.ldexp(torch.ones_like(maxima), exponent)
    # Non-finite gradients must stay non-finite, so that the step is skipped.
    return torch.where(maxima.isfinite(), power, torch.nan)


def product(a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype, *, on_gpu: bool) -> Tensor:
    """Compute a (M, K) times the transpose of b (N, K) with float32 sums.

    Args:
        a: first factor.
        b: second factor.
        dtype: dtype of the result (M, N).
        on_gpu: use torch's float8 product, which needs scales per row.
    """
    if not on_gpu:
        return (to_float32(a) @ to_float32(b).t()).to(dtype)
    # The kernel needs a K that is a multiple of 16; zeros do not change the sums.
    pad = (0, -a.codes.shape[1] % MULTIPLE)
    codes_a, codes_b = (_padded(factor.codes, pad) for factor in (a, b))
    output = F.scaled_mm(
        codes_a,
        codes_b.t(),
        a.scales,
        F.ScalingType.RowWise,
        b.scales.t(),
        F.ScalingType.RowWise,
        output_dtype=torch.bfloat16,  # the only output dtype that supports scales per row
    )
    return output.to(dtype)


def _padded(codes: Tensor, pad: tuple[int, int]) -> Tensor:
    """Return contiguous codes with zero columns appended, as bytes: torch cannot pad float8."""
    return F.pad(codes.view(torch.uint8), pad).view(E4M3) if pad[1] else codes.contiguous()


class Float8Linear(nn.Linear):
    """Linear layer with float8 products; `use_float8` converts linear layers of a model."""

    recipe: Recipe
    on_gpu: bool
    """Use torch's float8 product; otherwise emulate it."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., I) to (..., O)."""
        weight = self.weight
        output: Tensor
        if not isinstance(weight, DTensor):
            output = _Products.apply(x, weight, self.recipe, self.on_gpu)  # type: ignore[no-untyped-call]
        else:
            output = self._of_tensor_rank(x, weight)
        return output if self.bias is None else output + self.bias

    def _of_tensor_rank(self, x: Tensor, weight: DTensor) -> Tensor:
        """Multiply this tensor rank's part of the weight, which is split by rows or columns."""
        assert isinstance(x, DTensor)
        (split,) = weight.placements
        is_column = split == Shard(0)
        # Column parallel: inputs are replicated, and their gradients summed over ranks. Row
        # parallel: inputs are sharded, and outputs summed over ranks.
        inputs: Placement = Replicate() if is_column else Shard(x.ndim - 1)
        outputs: Placement = Shard(x.ndim - 1) if is_column else Partial()
        local = x.redistribute(placements=[inputs]).to_local(
            grad_placements=[Partial() if is_column else inputs]
        )
        output = _Products.apply(  # type: ignore[no-untyped-call]
            local, weight.to_local(), self.recipe, self.on_gpu
        )
        return DTensor.from_local(output, weight.device_mesh, [outputs], run_check=False)


class _Products(torch.autograd.Function):
    """The three float8 products of a linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, on_gpu: bool) -> Tensor:
        """Map x (..., I) and weight (O, I) to (..., O)."""
        # In their own precision: the backward rounds them again, along other dims.
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.on_gpu = recipe, on_gpu
        rows = to_float8(x.flatten(0, -2), recipe.activation)  # (T, I)
        columns = to_float8(weight, recipe.weight)  # (O, I)
        output = product(rows, columns, x.dtype, on_gpu=on_gpu)
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients of x and weight."""
        x, weight = ctx.saved_tensors
        recipe, on_gpu = ctx.recipe, ctx.on_gpu
        dy = gradient.flatten(0, -2)  # (T, O)
        dx = dw = None
        # Each product rounds its factors along its own summed dim, so nothing can be reused from
        # the forward pass.
        if ctx.needs_input_grad[0]:
            by_row = to_float8(dy, recipe.activation)  # (T, O)
            transposed = to_float8(weight.t(), recipe.weight)  # (I, O)
            dx = product(by_row, transposed, x.dtype, on_gpu=on_gpu).view(x.shape)
        if ctx.needs_input_grad[1]:
            dy_t = to_float8(dy.t(), recipe.activation)  # (O, T)
            x_t = to_float8(x.flatten(0, -2).t(), recipe.activation)  # (I, T)
            dw = product(dy_t, x_t, weight.dtype, on_gpu=on_gpu)
        return dx, dw, None, None


def _multiplies_on_gpu(recipe: Recipe, device: torch.device) -> bool:
    """Whether torch multiplies float8 matrices on this device."""
    return (
        recipe.on_gpu
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def use_float8(stage: nn.Module, plan: ModelPlan, float8: Float8, device: torch.device) -> None:
    """Convert the linear layers of a stage's blocks to float8, in place.

    The head, embeddings, routers and experts keep their precision, and so do layers whose sizes
    on this rank are not multiples of 16.

    Args:
        stage: a stage after its split over the tensor axis and before it is sharded.
        plan: plan of the model, which names the blocks.
        float8: recipe, or `none` to change nothing.
        device: device of the run.

    Raises:
        ConfigError: no layer can be converted.
    """
    if float8 == "none":
        return
    linear = list(_block_linears(stage, plan))
    suitable = [(name, module) for name, module in linear if _fits(module)]
    if linear and not suitable:
        name, module = linear[0]
        raise ConfigError(
            f"float8={float8!r} needs linear layers whose sizes on a rank are multiples of"
            f" {MULTIPLE}, got {tuple(module.weight.shape)} of {name}; change the model's sizes, or"
            " set float8 to none"
        )
    recipe = RECIPES[float8]
    on_gpu = _multiplies_on_gpu(recipe, device)
    for _, module in suitable:
        # The class is changed in place, so parameters, hooks and names stay.
        module.__class__ = Float8Linear
        module.recipe, module.on_gpu = recipe, on_gpu  # type: ignore[assignment]
    if len(suitable) < len(linear):
        names = ", ".join(name for name, module in linear if not _fits(module))
        logger.warning("float8: sizes are not multiples of %d, so not used in %s", MULTIPLE, names)
    if device.type == "cuda" and not on_gpu:
        logger.warning(
            "float8=%r is emulated in float32 on this device, which is slow; use it to compare"
            " losses, not for speed",
            float8,
        )


def check_float8(float8: Float8, schedule: Schedule) -> None:
    """Check that a schedule can be combined with float8 products.

    Raises:
        ConfigError: the schedule splits the backward pass, which intercepts plain linear layers.
    """
    if float8 != "none" and schedule.splits_backward:
        raise ConfigError(
            f"float8={float8!r} cannot be combined with schedule={schedule.name!r}, which splits"
            " the backward pass; use schedule 1f1b, gpipe or interleaved-1f1b, or set float8 to"
            " none"
        )


def _block_linears(stage: nn.Module, plan: ModelPlan) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the plain linear layers within blocks."""
    blocks = tuple(f"{name}." for name, _ in stage.named_modules() if plan.is_block(name))
    for name, module in stage.named_modules():
        if type(module) is nn.Linear and name.startswith(blocks):
            yield name, module


def _fits(module: nn.Linear) -> bool:
    weight = module.weight
    # Tensor parallelism divides a dim, so the local size counts.
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return all(size % MULTIPLE == 0 for size in local.shape)
