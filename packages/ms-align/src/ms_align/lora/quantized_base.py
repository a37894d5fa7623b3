"""Frozen linear layers and experts with weights in 4 or 8 bits, the bases of adapters in QLoRA.

Dettmers et al. 2023 (QLoRA, arXiv 2305.14314): adapters are trained in full precision on a base
whose weights are stored in few bits and expanded for each product, in the forward and again in the
backward, so that no expanded weight stays in memory.

Shapes: O outputs, I inputs of a linear layer, E experts, T rows sorted by expert.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from ms_align.errors import ConfigError

BaseFormat = Literal["none", "nf4", "int8", "fp8"]
"""Storage format of the frozen weights under adapters; `none` keeps their dtype."""
BLOCK: Final = 64
"""Weights that share a scale in NF4, in the order of memory."""
SCALE_BLOCK: Final = 256
"""NF4 scales that share a second scale."""
TAIL: Final = 0.9677083
"""Probability at NF4's outermost quantile: 1 - (1/30 + 1/32) / 4, the mean of 15 and 16 intervals
(QLoRA, appendix E)."""
E4M3_LARGEST: Final = 448.0


def _nf4_values() -> Tensor:
    """Compute NF4's 16 numbers: quantiles of N(0, 1) with an exact zero, scaled to [-1, 1].

    Eight are positive and seven negative, at equal steps of probability on each side.
    """

    def quantiles(count: int) -> Tensor:
        probabilities = torch.linspace(TAIL, 0.5, count + 1, dtype=torch.float64)[:-1]
        values: Tensor = torch.special.ndtri(probabilities)
        return values

    values = torch.cat((-quantiles(7), torch.zeros(1, dtype=torch.float64), quantiles(8)))
    return (values.sort().values / values.max()).float()


NF4: Final = _nf4_values()


@frozen
class StoredWeight:
    """A storage format: stores a weight (O, I) in tensors, and reads it in float32."""

    store: Callable[[Tensor], dict[str, Tensor]]
    read: Callable[[Mapping[str, Tensor], int], Tensor]
    """Takes the tensors and the number of inputs."""


def _store_nf4(weight: Tensor) -> dict[str, Tensor]:
    """Store 4-bit indices into `NF4`, scales of 64 weights in 8 bits, and scales of 256 scales."""
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)  # (B,)
    # Scales are positive, so their mean is subtracted before they are rounded to signed 8 bits.
    mean = scales.mean()
    groups = F.pad(scales - mean, (0, -len(scales) % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    steps = groups.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127  # (B / 256,)
    codes = (groups / steps[:, None]).round().to(torch.int8).flatten()[: len(scales)]
    stored = {"scale_codes": codes, "scale_steps": steps, "scale_mean": mean}
    scales = _nf4_scales(stored).clamp_min(torch.finfo(torch.float32).tiny)
    middles = (NF4[1:] + NF4[:-1]).to(weight.device) / 2
    indices = torch.bucketize((blocks / scales[:, None]).flatten(), middles).to(torch.uint8)
    return {"indices": indices[::2] | indices[1::2] << 4, **stored}


def _nf4_scales(stored: Mapping[str, Tensor]) -> Tensor:
    """Return the scale of each block of 64 weights, (B,) float32."""
    codes = stored["scale_codes"].float()
    steps = stored["scale_steps"].repeat_interleave(SCALE_BLOCK)[: len(codes)]
    return codes * steps + stored["scale_mean"]


def _read_nf4(stored: Mapping[str, Tensor], inputs: int) -> Tensor:
    pairs = stored["indices"]
    indices = torch.stack((pairs & 15, pairs >> 4), 1).flatten().long()
    blocks = NF4.to(pairs.device)[indices].view(-1, BLOCK)
    numbers = (blocks * _nf4_scales(stored)[:, None]).flatten()
    return numbers[: len(numbers) // inputs * inputs].view(-1, inputs)


def _store_int8(weight: Tensor) -> dict[str, Tensor]:
    """Store 8-bit integers, and a scale per output."""
    scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    codes = (weight / scales[:, None]).round().clamp(-127, 127)
    return {"codes": codes.to(torch.int8), "scales": scales}


def _store_fp8(weight: Tensor) -> dict[str, Tensor]:
    """Store e4m3 numbers, and a scale per output."""
    scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / E4M3_LARGEST
    codes = (weight / scales[:, None]).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return {"codes": codes.to(torch.float8_e4m3fn), "scales": scales}


def _read_by_row(stored: Mapping[str, Tensor], inputs: int) -> Tensor:
    return stored["codes"].float() * stored["scales"][:, None]


FORMATS: Final[Mapping[str, StoredWeight]] = {
    "nf4": StoredWeight(_store_nf4, _read_nf4),
    "int8": StoredWeight(_store_int8, _read_by_row),
    "fp8": StoredWeight(_store_fp8, _read_by_row),
}


class QuantizedLinear(nn.Module):
    """Frozen linear layer whose weight is stored in a format of few bits.

    Args:
        layer: layer whose weight is rounded; its bias is kept.
        base_format: key of `FORMATS`.

    Raises:
        ConfigError: the weight contains NaN or infinity.
    """

    def __init__(self, layer: nn.Linear, base_format: str) -> None:
        super().__init__()
        self.format = FORMATS[base_format]
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype = layer.weight.dtype
        weight = _finite(layer.weight.detach().float(), base_format)
        for name, tensor in self.format.store(weight).items():
            self.register_buffer(name, tensor)
        self.bias = layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    @property
    def weight(self) -> Tensor:
        """Rounded weight (O, I), in the dtype of the original one."""
        stored = dict(self.named_buffers())
        numbers = self.format.read(stored, self.in_features)
        return numbers[: self.out_features].to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def plain(self, weight: Tensor) -> nn.Linear:
        """Return a linear layer with this weight (O, I) and the same bias."""
        has_bias = self.bias is not None
        layer = nn.Linear(self.in_features, self.out_features, bias=has_bias, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if has_bias:
            layer.bias = self.bias
        return layer


class QuantizedExperts(nn.Module):
    """Frozen grouped linear map whose weights are stored in 4 or 8 bits, expert by expert.

    Args:
        layer: map whose weight (E, ..., I) is rounded and dropped; its bias is kept.
        base_format: key of `FORMATS`.

    Raises:
        ConfigError: the weight contains NaN or infinity.
    """

    def __init__(self, layer: Any, base_format: str) -> None:
        super().__init__()
        self.format = FORMATS[base_format]
        weight = layer.weight.detach()
        self.shape, self.dtype = weight.shape, weight.dtype
        # One expert at a time: a float32 copy of all experts would be larger than the model.
        stored = [
            self.format.store(_finite(matrix.flatten(0, -2).float(), base_format))
            for matrix in weight
        ]
        for name in stored[0]:
            self.register_buffer(name, torch.stack([tensors[name] for tensors in stored]))
        self.source = layer
        self.release()

    @property
    def weight(self) -> Tensor:
        """Rounded weights (E, ..., I), in the original dtype."""
        return torch.stack([self.expert(e) for e in range(self.shape[0])]).view(self.shape)

    @property
    def bias(self) -> Tensor | None:
        """Bias of the original map."""
        bias: Tensor | None = self.source.bias
        return bias

    def expert(self, index: int) -> Tensor:
        """Return the rounded weight of one expert, (O, I)."""
        stored = {name: buffer[index] for name, buffer in self.named_buffers(recurse=False)}
        outputs = self.shape[1:-1].numel()
        return self.format.read(stored, self.shape[-1])[:outputs].to(self.dtype)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (T, I), sorted by expert with `counts` (E,), to (T, O)."""
        y: Tensor = _GroupedProduct.apply(rows, counts, self)  # type: ignore[no-untyped-call]
        if self.bias is None:
            return y
        return y + self.bias.flatten(1).to(y.dtype).repeat_interleave(counts, 0)

    def plain(self, weight: Tensor) -> nn.Module:
        """Return the original map with this weight."""
        _set_weight(self.source, weight.view(self.shape))
        source: nn.Module = self.source
        return source

    def release(self) -> None:
        """Drop the weight of the original map."""
        _set_weight(self.source, torch.empty((0, 0, 0), dtype=self.dtype))


def _set_weight(layer: Any, weight: Tensor) -> None:
    if hasattr(layer, "set_weight"):
        layer.set_weight(weight)
    else:
        layer.weight = nn.Parameter(weight, requires_grad=False)


def _finite(weight: Tensor, base_format: str) -> Tensor:
    if not weight.isfinite().all():
        raise ConfigError(
            f"a weight of shape {tuple(weight.shape)} contains NaN or infinity, which"
            f" quantize_base={base_format!r} cannot store; use an undamaged model"
        )
    return weight


class _GroupedProduct(torch.autograd.Function):
    """Product of each expert's rows with its weight, expanded one expert at a time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor, layer: QuantizedExperts) -> Tensor:
        """Map rows (T, I) to (T, O)."""
        ctx.layer, ctx.counts = layer, counts.tolist()
        out = rows.new_empty(len(rows), layer.shape[1:-1].numel())
        for expert, (part, target) in enumerate(zip(*_split(ctx.counts, rows, out), strict=True)):
            if len(part):
                target.copy_(F.linear(part, layer.expert(expert).to(rows.dtype)))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the rows."""
        result = gradient.new_empty(len(gradient), ctx.layer.shape[-1])
        parts = _split(ctx.counts, gradient, result)
        for expert, (part, target) in enumerate(zip(*parts, strict=True)):
            if len(part):
                target.copy_(part @ ctx.layer.expert(expert).to(gradient.dtype))
        return result, None, None


def _split(counts: list[int], *tensors: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    return tuple(torch.split(tensor, counts) for tensor in tensors)


class _Product(torch.autograd.Function):
    """Product with a weight that is expanded in both passes instead of being saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        """Map x (..., I) to (..., O)."""
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        return gradient @ ctx.layer.weight.to(gradient.dtype), None
