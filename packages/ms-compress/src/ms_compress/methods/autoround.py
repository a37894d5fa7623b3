"""AutoRound: learn how each weight rounds, from the output error of its decoder layer.

Cheng et al. 2023, arXiv:2309.05516. Each weight gets an offset V of at most half a code, each scale
a clipping factor, and both take a few hundred steps of signed gradient descent on the squared
error of the decoder layer's output. Differences from the paper:
1. Schemes without zero points learn the logarithm of one multiplier per scale instead of factors
   for the smallest and largest weight; K-quants keep the scales of their search.
2. A step is one batch of the calibration rows. Its loss is compared with that of rounding to
   nearest on the same batch, so that the best step is not simply the easiest batch. At the end the
   best and the last step are measured on all batches.
3. For floating-point codes V is in units of the distance between neighboring codes.
Shapes: N rows, K features; R by G scales.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress.arguments import check_flags, check_integer
from ms_compress.errors import CalibrationError, ConfigError
from ms_compress.methods.calibration import (
    BlockCheckpoint,
    CalibratedBlock,
    calibrate_inputs,
    check_calibration,
    walk,
)
from ms_compress.methods.data_ranks import ONE_PROCESS, DataRanks, check_ranks
from ms_compress.methods.gptq import factor_of_rounded
from ms_compress.methods.qat import qat
from ms_compress.models.selection import select
from ms_compress.quantization.layers import FACTOR, Prepared, prepared_layers
from ms_compress.quantization.rounding import (
    best_factor,
    code_spacing,
    compute_scales,
    compute_zeros,
    per_weight,
    round_with_scales,
    sum_per_scale,
)
from ms_compress.quantization.scheme import Scheme

STEPS = 200
"""Default number of steps per decoder layer, as in the paper."""


def autoround(
    model: nn.Module,
    scheme_name: str | Scheme,
    batches: Sequence[Tensor],
    *,
    ignore: Sequence[str] = (),
    activations: bool = True,
    iters: int = STEPS,
    fit_scales: bool = False,
    checkpoint: BlockCheckpoint | None = None,
    progress: Callable[[int, int], object] | None = None,
    ranks: DataRanks = ONE_PROCESS,
) -> None:
    """Prepare a model for a scheme and learn the rounding of its weights, in place.

    Args:
        model: a complete decoder from ms-parallel or transformers; masks are preserved.
        scheme_name: scheme or its name, such as `"ct.int4_g32"`.
        batches: calibration tokens, (B, S) int64 each; a step uses one batch per process.
        ignore: name patterns of layers to leave unchanged.
        activations: also quantize inputs, if the target does.
        iters: steps per decoder layer.
        fit_scales: start from the scale of each group with the smallest rounding error.
        checkpoint: storage of finished decoder layers, to resume from.
        progress: called with the number of finished decoder layers, from 0, and their total.
        ranks: processes that calibrate on the other batches.

    Raises:
        ConfigError: iters is below 1, or an exception matches nothing.
        LayerError: the model's architecture, or a layer, is not supported.
        CalibrationError: no tokens are given or a weight is not finite, and the model is unchanged;
            or a layer's output is not finite, and earlier layers are already rounded.
    """
    check_flags(activations=activations, fit_scales=fit_scales, error=ConfigError)
    check_integer("iters", iters, minimum=1, error=ConfigError)
    check_ranks(ranks)
    check_calibration(model, batches, {name for name, _ in select(model, ignore)})
    qat(model, scheme_name, ignore=ignore, activations=activations, learned_scales=True)
    calibrate_inputs(model, batches, ranks=ranks)
    rounding = SignRounding(iters=iters, fit_scales=fit_scales, ranks=ranks)
    targets = {name for name, layer in prepared_layers(model) if layer.scheme is not None}
    walk(
        model,
        batches,
        None,
        rounding.round_layers,
        targets,
        float_outputs=True,
        checkpoint=checkpoint,
        progress=progress,
        ranks=ranks,
    )


@frozen(kw_only=True, eq=False)
class SignRounding:
    """Learns the rounding of one decoder layer at a time; for the fields see `autoround`."""

    iters: int = STEPS
    fit_scales: bool = False
    ranks: DataRanks = ONE_PROCESS

    def round_layers(self, block: CalibratedBlock[Any]) -> None:
        """Round prepared layers in place, to be as close as possible to the float outputs."""
        learned = {
            name: LearnedRounding(layer, fit_scales=self.fit_scales)
            for name, layer in block.layers.items()
            if isinstance(layer, Prepared)
        }
        with _learning(block.module, learned):
            # Step 0, which rounds to nearest, is the measure of all others.
            nearest = self._losses(block, learned)  # one per batch of this process
            if not self._total(nearest) < torch.inf:
                raise CalibrationError(
                    f"{block.name}: its output for the calibration tokens is NaN or infinite; check"
                    " the weights up to it, and the tokens"
                )
            self._descend(block, learned, nearest)
        for rounding in learned.values():
            rounding.finish()

    def _descend(
        self,
        block: CalibratedBlock[Any],
        learned: Mapping[str, "LearnedRounding"],
        nearest: Sequence[float],
    ) -> None:
        """Take all steps, and leave the parameters of the best one."""
        tiny = torch.finfo(torch.float32).tiny
        initial = best = [rounding.parameters() for rounding in learned.values()]
        least = 1.0
        for step, index in enumerate(_order(len(nearest), self.iters)):
            weights = [rounding.install() for rounding in learned.values()]
            with torch.enable_grad():
                loss = _loss(block, index)
            # An expert without tokens has no gradient.
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            relative = self._total([float(loss) / max(nearest[index], tiny)]) / self.ranks.count
            if relative < least:
                best, least = [rounding.parameters() for rounding in learned.values()], relative
            rate = (1 - step / self.iters) / self.iters
            for rounding, gradient in zip(learned.values(), gradients, strict=True):
                local = torch.zeros_like(rounding.weight) if gradient is None else gradient
                rounding.update(self.ranks.sum(local), rate)
        last = [rounding.parameters() for rounding in learned.values()]
        results = [(self._total(nearest), initial)]
        for candidate in (best, last):
            for rounding, values in zip(learned.values(), candidate, strict=True):
                rounding.set_parameters(values)
            results.append((self._total(self._losses(block, learned)), candidate))
        _, final = min(results, key=lambda result: result[0])
        for rounding, values in zip(learned.values(), final, strict=True):
            rounding.set_parameters(values)

    def _losses(
        self, block: CalibratedBlock[Any], learned: Mapping[str, "LearnedRounding"]
    ) -> list[float]:
        """Return the loss of the current rounding on each batch of this process."""
        for rounding in learned.values():
            rounding.install()
        with torch.no_grad():
            return [float(_loss(block, index)) for index in range(len(block.float_outputs))]

    def _total(self, losses: Sequence[float]) -> float:
        """Return the sum of the losses of all processes. Collective."""
        device = self.ranks.device
        return float(self.ranks.sum(torch.tensor(sum(losses), dtype=torch.float64, device=device)))


Parameters = tuple[Tensor, ...]
"""Learned values of a layer: offsets (N, K), and one or two clipping factors (R, G)."""


class LearnedRounding:
    """Learned rounding of one prepared layer.

    Args:
        layer: layer whose weight is rounded.
        fit_scales: start from the scales with the smallest rounding error.
    """

    def __init__(self, layer: Prepared, *, fit_scales: bool) -> None:
        assert layer.scheme is not None
        self.layer, self.scheme = layer, layer.scheme
        self.original = layer.weight
        weight = layer.weight.detach().float()
        self.weight = weight if layer.mask is None else weight * layer.mask
        """(N, K) float32."""
        scheme, shape = self.scheme, self.weight.shape
        is_nested = scheme.super_block is not None
        factor = best_factor(self.weight, scheme) if fit_scales or is_nested else None
        self._fixed: tuple[Tensor, Tensor | None] | None = None
        if is_nested:
            scales = compute_scales(self.weight, scheme, factor)
            self._fixed = scales, compute_zeros(self.weight, scales, scheme, factor)
        self.offsets = torch.zeros_like(self.weight)
        """(N, K), V: shift before rounding, in codes."""
        ones = self.weight.new_ones(scheme.scale_shape(*shape))
        if scheme.symmetric or is_nested:
            self.clips = [torch.zeros_like(ones) if factor is None or is_nested else factor]
            if scheme.values is not None:
                self._keep_peaks()
        else:
            # A fitted scale shrinks both ends.
            start = ones if factor is None else factor.exp().clamp_(max=1)
            self.clips = [start, start.clone()]
            cells = self.weight.view(shape[0], -1, scheme.group_of(shape[1]))
            self._low, self._high = cells.amin(-1).clamp_(max=0), cells.amax(-1).clamp_(min=0)

    def parameters(self) -> Parameters:
        """Return a copy of the learned values."""
        return (self.offsets.clone(), *(clip.clone() for clip in self.clips))

    def set_parameters(self, values: Parameters) -> None:
        """Replace the learned values."""
        self.offsets, *self.clips = (value.clone() for value in values)

    def install(self) -> Tensor:
        """Round the weight, let the layer compute with it, and return it as a leaf."""
        scheme = self.scheme
        scales, zeros = (
            None if value is None else per_weight(value, self.weight.shape, scheme)
            for value in self._grid()
        )
        assert scales is not None
        spacing = code_spacing(self.weight, scales, scheme)
        shifted = self.offsets * spacing + self.weight
        rounded = round_with_scales(shifted, scales, scheme, zeros)
        rounded = torch.where(scales == 0, 0.0, rounded)  # a group of zeros
        # 1 and -1 where the last code clips the weight, beyond which rounding has no gradient.
        margin = scales.abs() * (scheme.end_spacing / 2 * (1 + 1e-5))
        excess = shifted - rounded
        self._clipped = (excess > margin).to(torch.int8) - (excess < -margin).to(torch.int8)
        if self.layer.mask is not None:
            rounded = rounded * self.layer.mask
        self._rounded = rounded
        leaf = rounded.to(self.original.dtype).requires_grad_()
        self.layer._parameters["weight"] = leaf  # type: ignore[assignment]
        return leaf

    def update(self, gradient: Tensor, rate: float) -> None:
        """Take a step of signed gradient descent with the gradient (N, K) of `install`'s result.

        Rounding is treated as the identity. Inside the range, d rounded / d V is then one code and
        d rounded / d log scale is rounded - weight; a clipped weight follows the end of the range.
        """
        gradient = gradient.float()
        inside = self._clipped == 0
        through = gradient * inside
        self.offsets -= rate * through.sign()
        if self._fixed is not None:
            return
        by_scale = through * (self._rounded - self.weight)
        if self.scheme.symmetric:
            by_scale += gradient * ~inside * self._rounded
            self.clips[0] -= rate * sum_per_scale(by_scale, self.scheme).sign()
            if self.scheme.values is not None:
                self._keep_peaks()
            return
        low, high = self.clips
        extent = (self._high * high - self._low * low).clamp(min=torch.finfo(torch.float32).tiny)
        inner = sum_per_scale(by_scale, self.scheme) / extent
        top = sum_per_scale(gradient * (self._clipped > 0), self.scheme) + inner
        bottom = sum_per_scale(gradient * (self._clipped < 0), self.scheme) - inner
        low.sub_(rate * (bottom * self._low).sign()).clamp_(0, 1)
        high.sub_(rate * (top * self._high).sign()).clamp_(0, 1)

    def _keep_peaks(self) -> None:
        """Let the largest weight of each group keep the end code of a table of values.

        The table is not symmetric, and the sign of a scale is that of the largest rounded weight.
        """
        self.clips[0].clamp_(max=0)
        cells = self.weight.view(len(self.weight), -1, self.scheme.group_of(self.weight.shape[1]))
        peaks = cells.abs() == cells.abs().amax(-1, keepdim=True)
        self.offsets.masked_fill_(peaks.view_as(self.offsets), 0.0)

    @torch.no_grad()
    def finish(self) -> None:
        """Store the rounded weight, and the factor that gives its scales."""
        self.install()
        self.layer._parameters["weight"] = self.original  # type: ignore[assignment]
        scales, zeros = self._grid()  # before the weight, which it is computed from, changes
        self.original.copy_(self._rounded)
        minimums = zeros if self._fixed is not None else None
        factor = factor_of_rounded(self.original.detach(), scales, self.scheme, minimums)
        self.layer.get_parameter(FACTOR).copy_(factor)

    def _grid(self) -> tuple[Tensor, Tensor | None]:
        """Return scales (R, G), and zero points or minimums (R, G)."""
        if self._fixed is not None:
            return self._fixed
        if self.scheme.symmetric:
            return compute_scales(self.weight, self.scheme, self.clips[0]), None
        scheme, (low, high) = self.scheme, self.clips
        bottom = self._low * low
        scales = ((self._high * high - bottom) / scheme.divisor).to(scheme.dtype).float()
        scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
        zeros = (scheme.low - bottom / scales).clamp_(scheme.low, scheme.high).round_()
        return scales, zeros


@contextmanager
def _learning(block: nn.Module, learned: Mapping[str, LearnedRounding]) -> Iterator[None]:
    """Let prepared layers compute with their current weight and rounded inputs; freeze the rest."""
    layers = [rounding.layer for rounding in learned.values()]
    before = [(layer.scheme, layer.quantizing, layer.weight) for layer in layers]
    trainable = [parameter for parameter in block.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    for layer in layers:
        layer.scheme, layer.quantizing = None, True
    try:
        yield
    finally:
        for layer, (scheme, quantizing, weight) in zip(layers, before, strict=True):
            layer.scheme, layer.quantizing = scheme, quantizing
            layer._parameters["weight"] = weight  # type: ignore[assignment]
        for parameter in trainable:
            parameter.requires_grad_()


def _loss(block: CalibratedBlock[Any], index: int) -> Tensor:
    """Return the mean squared error of the decoder layer's output for a batch."""
    return F.mse_loss(block.run(index).float(), block.float_outputs[index].float())


def _order(batches: int, steps: int) -> Iterator[int]:
    """Yield the batch of each step: all batches in random order, again and again."""
    generator = torch.Generator().manual_seed(0)
    order: list[int] = []
    for _ in range(steps):
        order = order or torch.randperm(batches, generator=generator).tolist()
        yield order.pop()
