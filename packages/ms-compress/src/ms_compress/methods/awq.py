"""AWQ and SmoothQuant: move the range of features between inputs and weights before rounding.

AWQ (Lin et al. 2023, arXiv:2306.00978) scales up the weights of features with large inputs, so that
they lose less in rounding. SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) scales down features
with outliers, so that inputs round better. The scales are folded into the preceding norm or linear
layer, so the float model does not change.

Differences from AWQ's paper:
1. The output error of a weight error E is tr(E H Eᵀ), with H = XᵀX over all calibration tokens,
   instead of a forward for each candidate: memory and time do not grow with the number of tokens.
2. Candidates with and without the weights' mean magnitude in the denominator are both tried.
3. If the target rounds inputs, the error of rounding a sample of inputs is added.
Shapes: N rows, K features, P scales of a fold, T tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import attrs
import torch
from torch import Tensor, nn

from ms_compress.arguments import check_flags, check_integer, check_number, shown
from ms_compress.errors import ConfigError
from ms_compress.methods.autoround import STEPS, SignRounding
from ms_compress.methods.calibration import (
    BlockCheckpoint,
    CalibratedBlock,
    check_calibration,
    walk,
)
from ms_compress.methods.data_ranks import ONE_PROCESS, DataRanks, check_ranks
from ms_compress.methods.folding import Fold, find_folds
from ms_compress.methods.gptq import GPTQRounding
from ms_compress.methods.qat import qat
from ms_compress.models.selection import select
from ms_compress.quantization.layers import FACTOR, INPUT_PEAK, Prepared, prepared_layers
from ms_compress.quantization.rounding import best_factor, round_activations, round_weight
from ms_compress.quantization.scheme import Scheme
from ms_compress.settings import nearest
from ms_compress.targets.rules import scheme

RATIOS = tuple(step / 20 for step in range(20))
"""Exponents of the mean input magnitude that AWQ tries."""
SAMPLE_ROWS = 512
"""Tokens per layer on which the error of rounded inputs is measured."""
MIN_SCALE = 1e-4
"""Smallest scale before normalization, for features that are always zero."""
Rounding = Literal["rtn", "gptq", "autoround"]
ROUNDINGS = get_args(Rounding)


def awq(
    model: nn.Module,
    scheme_name: str | Scheme,
    batches: Sequence[Tensor],
    *,
    ignore: Sequence[str] = (),
    activations: bool = True,
    rounding: Rounding = "rtn",
    clip: bool = True,
    act_order: bool = False,
    by_loss: bool = False,
    iters: int = STEPS,
    checkpoint: BlockCheckpoint | None = None,
    progress: Callable[[int, int], object] | None = None,
    ranks: DataRanks = ONE_PROCESS,
) -> None:
    """Prepare a model for a scheme, with feature scales that minimize the output error, in place.

    Args:
        model: a complete decoder from ms-parallel or transformers; masks are preserved.
        scheme_name: scheme or its name, such as `"ct.int4_g128"`.
        batches: calibration tokens, (B, S) int64 each.
        ignore: name patterns of layers to leave in float.
        activations: also quantize inputs, if the target does.
        rounding: how to round after scaling: to nearest ("rtn"), with GPTQ ("gptq") or with
            AutoRound ("autoround").
        clip: search for the scale of each group of weights with the smallest output error.
        act_order: GPTQ rounds the columns with the largest inputs first.
        by_loss: GPTQ weights errors by their effect on the model's predictions.
        iters: steps of AutoRound per decoder layer.
        checkpoint: storage of finished decoder layers, to resume from.
        progress: called with the number of finished decoder layers, from 0, and their total.
        ranks: processes that calibrate on the other batches.

    Raises:
        ConfigError: an exception matches nothing, or the rounding is unknown.
        LayerError: the model's architecture, or a layer, is not supported.
        CalibrationError: no tokens, or a weight is not finite (the model is unchanged); or a
            layer's input is not finite (earlier layers are already rounded).
    """
    _scale_and_round(
        model,
        scheme_name,
        batches,
        search_scales,
        ignore=ignore,
        activations=activations,
        rounding=rounding,
        fit_scales=clip,
        act_order=act_order,
        by_loss=by_loss,
        iters=iters,
        norms_only=False,
        checkpoint=checkpoint,
        progress=progress,
        ranks=ranks,
    )


def smoothquant(
    model: nn.Module,
    scheme_name: str | Scheme,
    batches: Sequence[Tensor],
    *,
    ignore: Sequence[str] = (),
    activations: bool = True,
    rounding: Rounding = "rtn",
    strength: float = 0.5,
    fit_scales: bool = False,
    act_order: bool = False,
    by_loss: bool = False,
    iters: int = STEPS,
    checkpoint: BlockCheckpoint | None = None,
    progress: Callable[[int, int], object] | None = None,
    ranks: DataRanks = ONE_PROCESS,
) -> None:
    """Prepare a model for a scheme that rounds inputs and move outliers into weights, in place.

    Args:
        model: a complete decoder from ms-parallel or transformers; masks are preserved.
        scheme_name: scheme or its name, such as `"ct.w8a8"`.
        batches: calibration tokens, (B, S) int64 each.
        ignore: name patterns of layers to leave in float.
        activations: also quantize inputs, if the target does.
        rounding: how to round after scaling: to nearest ("rtn"), with GPTQ ("gptq") or with
            AutoRound ("autoround").
        strength: migration strength α, 0 to 1: the scale of a feature is its largest input to the
            power α, divided by its largest weight to the power 1 - α.
        fit_scales: search for the scale of each group of weights with the smallest output error.
        act_order: GPTQ rounds the columns with the largest inputs first.
        by_loss: GPTQ weights errors by their effect on the model's predictions.
        iters: steps of AutoRound per decoder layer.
        checkpoint: storage of finished decoder layers, to resume from.
        progress: called with the number of finished decoder layers, from 0, and their total.
        ranks: processes that calibrate on the other batches.

    Raises:
        ConfigError, LayerError, CalibrationError: as in `awq`.
    """
    check_number("strength", strength, minimum=0, error=ConfigError)
    check_flags(activations=activations, error=ConfigError)
    if strength > 1:
        raise ConfigError(f"strength must be 0 to 1, got {strength}; use 0.5")
    quant_scheme = scheme(scheme_name)
    if not activations or quant_scheme.activations is None:
        raise ConfigError(
            f"smoothquant needs a scheme that quantizes inputs, got {quant_scheme} without;"
            " use awq, or a scheme such as ct.w8a8"
        )
    _scale_and_round(
        model,
        scheme_name,
        batches,
        lambda fold, statistics, layers: smooth_scales(fold, statistics, strength),
        ignore=ignore,
        activations=activations,
        rounding=rounding,
        fit_scales=fit_scales,
        act_order=act_order,
        by_loss=by_loss,
        iters=iters,
        norms_only=True,
        checkpoint=checkpoint,
        progress=progress,
        ranks=ranks,
    )


@attrs.define(eq=False)
class InputStatistics:
    """Statistics of a layer's inputs (T, K)."""

    hessian: Tensor
    """(K, K), XᵀX."""
    magnitudes: Tensor
    """(K,), sum of magnitudes."""
    largest: Tensor
    """(K,), largest magnitude."""
    samples: list[Tensor]
    """Some rows of the inputs of each batch."""

    def sample(self) -> Tensor:
        """Return at most `SAMPLE_ROWS` inputs, spread over the batches."""
        rows = torch.cat(self.samples)
        return rows[:: -(-len(rows) // SAMPLE_ROWS)]  # (at most SAMPLE_ROWS, K)

    def divide(self, scales: Tensor) -> None:
        """Update the statistics after the inputs were divided by scales (K,)."""
        # H = XᵀX, so both its rows and its columns are divided.
        self.hessian.div_(scales).div_(scales.unsqueeze(1))
        self.magnitudes.div_(scales)
        self.largest.div_(scales)
        self.samples = [rows / scales for rows in self.samples]


def add_inputs(total: InputStatistics | None, inputs: Tensor) -> InputStatistics:
    """Add inputs (T, K) float32."""
    magnitudes = inputs.abs()
    # A clone, as a view would hold all inputs of the batch in memory.
    sample = inputs[:: max(1, len(inputs) // 64)].clone()  # at most about 64 rows per batch
    if total is None:
        return InputStatistics(
            hessian=inputs.t() @ inputs,
            magnitudes=magnitudes.sum(0),
            # Zeros without inputs, as for an expert that gets no tokens.
            largest=magnitudes.amax(0) if len(inputs) else magnitudes.sum(0),
            samples=[sample],
        )
    total.hessian.addmm_(inputs.t(), inputs)
    total.magnitudes += magnitudes.sum(0)
    total.largest = torch.maximum(total.largest, magnitudes.amax(0))
    total.samples.append(sample)
    return total


def combine_inputs(ranks: DataRanks, local: InputStatistics) -> InputStatistics:
    """Return the statistics of the inputs of all processes. Collective."""
    return InputStatistics(
        hessian=ranks.sum(local.hessian),
        magnitudes=ranks.sum(local.magnitudes),
        largest=ranks.max(local.largest),
        samples=[ranks.concatenate(torch.cat(local.samples))],
    )


ScaleRule = Callable[[Fold, InputStatistics, Mapping[str, Prepared]], Tensor]
"""Computes a fold's scales (P,) from statistics of the readers' input and the quantized readers."""


def _scale_and_round(
    model: nn.Module,
    scheme_name: str | Scheme,
    batches: Sequence[Tensor],
    scale_rule: ScaleRule,
    *,
    ignore: Sequence[str],
    activations: bool,
    rounding: Rounding,
    fit_scales: bool,
    act_order: bool,
    by_loss: bool,
    iters: int,
    norms_only: bool,
    checkpoint: BlockCheckpoint | None,
    progress: Callable[[int, int], object] | None,
    ranks: DataRanks,
) -> None:
    check_flags(
        activations=activations,
        act_order=act_order,
        by_loss=by_loss,
        fit_scales=fit_scales,
        error=ConfigError,
    )
    check_ranks(ranks, by_loss=by_loss)
    check_integer("iters", iters, minimum=1, error=ConfigError)
    if not isinstance(rounding, str) or rounding not in ROUNDINGS:
        choice = nearest(str(rounding), ROUNDINGS)
        raise ConfigError(
            f"rounding must be 'rtn', 'gptq' or 'autoround', got {shown(rounding)}; {choice}"
        )
    check_calibration(model, batches, {name for name, _ in select(model, ignore)})
    qat(model, scheme_name, ignore=ignore, activations=activations, learned_scales=True)
    by_gptq = GPTQRounding(
        model=model, batches=batches, fit_scales=fit_scales, act_order=act_order, by_loss=by_loss
    )

    by_signs = SignRounding(iters=iters, fit_scales=fit_scales, ranks=ranks)

    def visit(block: CalibratedBlock[InputStatistics]) -> None:
        statistics = block.statistics
        layers = {k: layer for k, layer in block.layers.items() if isinstance(layer, Prepared)}
        for fold in find_folds(
            block.name, block.module, lambda: block.run(0), norms_only=norms_only
        ):
            readers = {name: layers[name] for name in fold.consumers if name in layers}
            if not readers:
                continue
            # All readers have the same input, so the statistics of any of them will do.
            scales = scale_rule(fold, statistics[next(iter(readers))], readers)  # (P,)
            fold.apply(scales)
            # Later folds and the rounding below need statistics of the scaled inputs.
            for name in readers:
                statistics[name].divide(scales[fold.scale_of])
        for name, layer in layers.items():
            if layer.input_peak is not None:
                layer.get_buffer(INPUT_PEAK).copy_(statistics[name].largest.amax())
        # Popped, so that each (K, K) matrix can be freed once its layer is rounded.
        hessians = {name: statistics.pop(name).hessian for name in layers}
        if rounding == "gptq":
            by_gptq.round_layers(block.layers, hessians)
        elif rounding == "autoround":
            hessians.clear()
            by_signs.round_layers(block)
        else:
            for name, layer in layers.items():
                assert layer.scheme is not None
                # Plain rounding needs no factor. K-quants always search, as in llama.cpp.
                if not fit_scales and layer.scheme.super_block is None:
                    continue
                weight = _masked(layer)  # (N, K)
                factor = best_factor(weight, layer.scheme, hessians.pop(name))
                layer.get_parameter(FACTOR).copy_(factor)

    targets = {name for name, layer in prepared_layers(model) if layer.scheme is not None}
    walk(
        model,
        batches,
        add_inputs,
        visit,
        targets,
        in_float=True,
        float_outputs=rounding == "autoround",
        checkpoint=checkpoint,
        progress=progress,
        ranks=ranks,
        combine=combine_inputs,
    )


def smooth_scales(fold: Fold, statistics: InputStatistics, strength: float) -> Tensor:
    """Return SmoothQuant's scales (P,): equation 4 of the paper."""
    largest_inputs = fold.reduce(statistics.largest, "amax")  # (P,)
    # One scale serves all readers, so take the largest weight of any of them: (K,) each.
    weights = [layer.weight.detach().float().abs().amax(0) for layer in fold.consumers.values()]
    largest_weights = fold.reduce(torch.stack(weights).amax(0), "amax")  # (P,)
    scales = largest_inputs.pow(strength) / largest_weights.clamp(min=1e-5).pow(1 - strength)
    # Features that are always zero get scale 1.
    return torch.where(largest_inputs > 0, scales.clamp(min=1e-5), 1.0)


def search_scales(
    fold: Fold, statistics: InputStatistics, layers: Mapping[str, Prepared]
) -> Tensor:
    """Return the candidate scales (P,) with the smallest output error of the quantized readers."""
    # Start from no scaling. A candidate must be strictly better than the best so far.
    best, least_error = torch.ones(fold.count, device=statistics.hessian.device), torch.inf
    weights = {name: _masked(layer) for name, layer in layers.items()}
    sample = statistics.sample()
    for scales in _candidates(fold, statistics, weights, layers):
        columns = scales[fold.scale_of]  # (K,)
        error = sum(
            _output_error(weights[name], columns, layer, statistics, sample)
            for name, layer in layers.items()
        )
        if error < least_error:
            best, least_error = scales, error
    return best


def _candidates(
    fold: Fold,
    statistics: InputStatistics,
    weights: Mapping[str, Tensor],
    layers: Mapping[str, Prepared],
) -> Iterator[Tensor]:
    """Yield candidate scales (P,), starting with all ones."""
    inputs = fold.reduce(statistics.magnitudes, "mean")  # (P,)
    # A common factor of the scales cancels below; normalizing keeps their powers in range.
    inputs = inputs / inputs.mean().clamp(min=torch.finfo(inputs.dtype).tiny)
    relative = []
    for name, weight in weights.items():
        quant_scheme = layers[name].scheme
        assert quant_scheme is not None
        group = quant_scheme.group_of(weight.shape[1])
        magnitudes = weight.abs().view(len(weight), -1, group)  # (N, K / group, group)
        # Relative to the group's largest weight, which decides the rounding step.
        peak = magnitudes.amax(-1, keepdim=True).clamp(min=1e-6)
        relative.append((magnitudes / peak).flatten(1).mean(0))  # (K,)
    means = fold.reduce(torch.stack(relative).mean(0), "mean")  # (P,)
    for divides_by_weights in (False, True):
        for ratio in RATIOS:
            scales = inputs.pow(ratio)
            if divides_by_weights:
                scales = scales / (means.pow(1 - ratio) + MIN_SCALE)
            scales = scales.clamp(min=MIN_SCALE)
            # Center on 1 in log scale: the largest and the smallest scale become reciprocals.
            yield scales / (scales.amax() * scales.amin()).sqrt()


def _output_error(
    weight: Tensor, columns: Tensor, layer: Prepared, statistics: InputStatistics, sample: Tensor
) -> float:
    """Return the squared output error of all tokens if the features are scaled by `columns`."""
    assert layer.scheme is not None
    scaled = weight * columns  # (N, K)
    # At run time the inputs are divided by `columns`; dividing the error instead keeps H unscaled.
    error = (round_weight(scaled, layer.scheme) - scaled) / columns  # (N, K)
    total = float((error @ statistics.hessian * error).sum())  # tr(E H Eᵀ)
    rule = layer.activations
    if rule is not None:
        divided = sample / columns
        peak = (statistics.largest / columns).amax() if rule.is_calibrated else None
        input_error = round_activations(divided, rule, None, peak) - divided  # (sample, K)
        # Extrapolates the error on the sample to all tokens: the ratio of their squared norms.
        share = float(statistics.hessian.diagonal().sum() / sample.square().sum().clamp(min=1e-30))
        # Weight and input errors are independent, so their squares add up.
        total += share * float((input_error @ scaled.t()).square().sum())
    return total


def _masked(layer: Prepared) -> Tensor:
    """Return the weight (N, K) float32 with pruned weights set to zero."""
    weight = layer.weight.detach().float()
    return weight if layer.mask is None else weight * layer.mask
