"""Layers that compute like their target: `nn.Linear` and `nn.Embedding`, prepared in place.

A prepared layer is the same object with the same parameters and names, changed to a subclass, so
hooks, ties, checkpoints and parallelism plans keep working. Under tensor parallelism its weight is
a DTensor and it computes on its local part. Groups must not cross process boundaries; this is
checked when the layer is prepared and when its weight is split.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from ms_compress.errors import LayerError, OrderError
from ms_compress.quantization.fake_quantization import (
    Rule,
    fake_linear,
    fake_weight,
    max_over_group,
)
from ms_compress.quantization.rounding import Reduce
from ms_compress.quantization.scheme import Activations, Scheme

FACTOR = "scale_factor"
"""Parameter (R, G) whose exponential multiplies the scales, if scales are learned."""


INPUT_PEAK = "input_amax"
"""Buffer () with the largest magnitude of a layer's inputs, if their scales are calibrated."""
K_SCALE, V_SCALE = "k_scale", "v_scale"
"""Buffers (1,) of an attention: scales of its cached keys and values, if these are calibrated."""


class Prepared(nn.Module):
    """Base class of layers that compute like their target."""

    weight: Tensor
    scheme: Scheme | None
    activations: Activations | None
    quantizing: bool
    """False during the float part of a float-then-quantized schedule."""
    calibrating: bool
    """Observe inputs in evaluation mode too."""
    layer_name: str
    local_mask: Tensor | None
    """The mask, on the device where it was last used. Not a buffer, so that it survives `to_empty`;
    checkpoints store the zeros themselves."""
    input_ndim: int | None
    """Required number of input dims; None for any. compressed-tensors keeps one input scale per
    index of the first two dims, which is one per token only for (B, S, K)."""
    compute_dtype: torch.dtype | None
    """Dtype of the weight in the last forward. Mixed precision narrows the stored weight before it
    is quantized, and export must narrow it in the same way to get the same codes."""

    @property
    def rule(self) -> Rule:
        """Quantization that the layer currently applies to weight and input."""
        on = self.quantizing
        return Rule(
            scheme=self.scheme if on else None, activations=self.activations if on else None
        )

    @property
    def factor(self) -> Tensor | None:
        """(R, G), or None if the scales are not learned."""
        return self._parameters.get(FACTOR)

    @property
    def input_peak(self) -> Tensor | None:
        """() float32, 0 before the calibration; None if input scales need none."""
        return self._buffers.get(INPUT_PEAK)

    def observe(self, x: Tensor, reduce_max: Reduce | None = None) -> Tensor | None:
        """Return the largest input magnitude so far; training and calibration update it with x."""
        peak = self.input_peak
        if peak is not None and (self.training or self.calibrating):
            largest = x.detach().abs().amax().float()
            largest = largest if reduce_max is None else reduce_max(largest)
            peak.copy_(torch.maximum(peak, largest))
        return peak

    @property
    def mask(self) -> Tensor | None:
        """(N, K) bool for this process's tensor-parallel part, or None."""
        if self.local_mask is not None and self.local_mask.device != self.weight.device:
            self.local_mask = self.local_mask.to(self.weight.device)
        return self.local_mask

    @property
    def stored_mask(self) -> Tensor | None:
        """Mask of the weights that this process stores: under FSDP, its shard of `mask`."""
        mask, weight = self.mask, self.weight
        if mask is None or not isinstance(weight, DTensor):
            return mask
        sizes = weight.to_local().shape
        if sizes == mask.shape:
            return mask
        chunks = weight.__create_chunk_list__()  # type: ignore[no-untyped-call]
        if not chunks:  # more processes than rows
            return mask.new_empty(sizes)
        starts = []
        for offset, mask_size, full_size in zip(
            chunks[0].offsets, mask.shape, weight.shape, strict=True
        ):
            # The mesh's last axis is tensor parallelism; all its parts except the last have equal
            # size, and FSDP's offsets are relative to the full weight.
            part = (
                full_size
                if mask_size == full_size
                else -(-full_size // weight.device_mesh.size(-1))
            )
            starts.append(offset % part)
        return mask[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]

    def set_mask(self, mask: Tensor) -> None:
        """Mask the layer.

        Args:
            mask: (N, K) bool for the whole weight, False for pruned weights.

        Raises:
            LayerError: the scheme cannot store zeros exactly.
        """
        if self.scheme is not None:
            check_zero(self.layer_name, self.scheme)
        self.local_mask = _part(mask, self.weight)

    @property
    def is_narrowed(self) -> bool:
        """Whether forwards compute float32 parameters in a narrower dtype."""
        return self.weight.dtype == torch.float32 and self.compute_dtype not in (
            None,
            torch.float32,
        )

    def to_compute_dtype(self, tensor: Tensor) -> Tensor:
        """Cast part of a stored parameter of this layer to the dtype used in forwards."""
        return tensor.to(self.compute_dtype) if self.is_narrowed else tensor

    def effective_weight(self) -> Tensor:
        """Return the weight used in the computation, (N, K), with the layout of `weight`."""
        weight = self.weight
        self.compute_dtype = weight.dtype
        if not isinstance(weight, DTensor):
            return fake_weight(weight, self.rule, self.factor, self.mask)
        factor = None if self.factor is None else local_part(self.factor)
        # groups never cross processes
        rounded = fake_weight(weight.to_local(), self.rule, factor, self.mask)
        return _with_layout_of(rounded, weight, tuple(weight.shape))

    def register_parameter(self, name: str, param: Any) -> None:
        """Register a parameter, and reject a split that would cut a weight group in two."""
        if isinstance(param, DTensor) and "layer_name" in self.__dict__:
            self._check_split(name, param)
        super().register_parameter(name, param)

    def _check_split(self, name: str, param: Any) -> None:
        if name == "weight" and self.scheme is not None:
            check_groups(self.layer_name, param, self.scheme)
        weight: Any = self.weight
        # load_state_dict replaces a weight that is already split by one with the same split.
        # parallelize_module replaces the plain weight by a DTensor; the mask is split at that
        # point.
        is_new_split = name == "weight" and not isinstance(weight, DTensor)
        if is_new_split:
            check_axes(self.layer_name, param)
        if is_new_split and self.local_mask is not None and self.local_mask.shape == param.shape:
            self.local_mask = _part(self.local_mask, param)
        if name == FACTOR and isinstance(weight, DTensor) and param.placements != weight.placements:
            raise OrderError(
                f"{self.layer_name}: its weight is split as {weight.placements}, but its learned"
                f" scales as {param.placements}; split the model first, then prepare it"
            )


class PreparedLinear(Prepared, nn.Linear):
    """A linear layer that computes like its target."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N)."""
        if self.input_ndim not in (None, x.ndim) and self.activations is not None:
            raise LayerError(
                f"{self.layer_name}: {self.scheme} needs inputs of shape (B, S, K), got"
                f" {tuple(x.shape)}, for which compressed-tensors would share activation scales"
                " between tokens; name the layer as an exception, such as"
                f" {_pattern(self.layer_name)!r}"
            )
        if isinstance(self.weight, DTensor):
            return _split_linear(self, x)
        self.compute_dtype = self.weight.dtype
        return fake_linear(
            x,
            self.weight,
            self.rule,
            factor=self.factor,
            mask=self.mask,
            bias=self.bias,
            input_peak=self.observe(x),
        )


class PreparedEmbedding(Prepared, nn.Embedding):
    """An embedding that returns rows as its target stores them."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (...) int64 to (..., K)."""
        if isinstance(self.weight, DTensor) or self.factor is not None or self.mask is not None:
            weight = self.effective_weight()
            by_freq = self.scale_grad_by_freq
            return F.embedding(tokens, weight, self.padding_idx, scale_grad_by_freq=by_freq)
        self.compute_dtype = self.weight.dtype
        # Rows are quantized independently, so only the rows that are looked up are rounded.
        rows = super().forward(tokens)
        return fake_weight(rows.flatten(0, -2), self.rule).view(rows.shape)


PREPARED_TYPES: dict[type[nn.Module], type[Prepared]] = {
    nn.Linear: PreparedLinear,
    nn.Embedding: PreparedEmbedding,
}


def prepare_layer(
    layer: nn.Module,
    name: str,
    scheme: Scheme | None,
    *,
    activations: Activations | None = None,
    learned_scales: bool = False,
) -> Prepared:
    """Make a layer compute like a scheme's target, in place; without a scheme, only add a mask.

    Raises:
        LayerError: the layer's type is not supported, or a group does not divide its rows.
        OrderError: it was sharded or split before in a way that is not supported.
    """
    check_layer(layer, name, scheme)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if not isinstance(layer, Prepared):
        # Changes the class of the same object, as fully_shard does: hooks, ties and names remain.
        layer.__class__ = PREPARED_TYPES[type(layer)]
        layer.scheme = layer.activations = layer.local_mask = None  # type: ignore[assignment]
        layer.compute_dtype = layer.input_ndim = None  # type: ignore[assignment]
    assert isinstance(layer, Prepared)
    layer.quantizing, layer.calibrating, layer.layer_name = True, False, name
    if scheme is not None:
        layer.scheme, layer.activations = scheme, activations
        if activations is not None and activations.is_calibrated and layer.input_peak is None:
            layer.register_buffer(INPUT_PEAK, torch.zeros((), device=weight.device))
        if learned_scales and layer.factor is None:
            layer.register_parameter(FACTOR, _factor(weight, scheme))
    return layer


def prepared_layers(model: nn.Module) -> Iterator[tuple[str, Prepared]]:
    """Yield the names and prepared layers of a model."""
    for name, layer in model.named_modules():
        if isinstance(layer, Prepared):
            yield name, layer


def check_layer(layer: nn.Module, name: str, scheme: Scheme | None) -> None:
    """Raise the errors of `prepare_layer` without changing anything."""
    if isinstance(layer, Prepared):
        if scheme is not None and layer.scheme is not None and layer.scheme != scheme:
            raise LayerError(
                f"{name} is already prepared for {layer.scheme}; prepare the model only once, with"
                " all layers of other schemes as exceptions"
            )
    elif isinstance(layer, FSDPModule):
        raise OrderError(f"{name} is wrapped by fully_shard; prepare the model before sharding it")
    elif type(layer) not in PREPARED_TYPES:
        raise LayerError(
            f"{name} must be an nn.Linear or nn.Embedding, got {type(layer).__name__}; add it to"
            " the exceptions"
        )
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        raise LayerError(
            f"{name} has max_norm={layer.max_norm}, so its forward changes the weight; name it as"
            " an exception"
        )
    if scheme is not None:
        check_groups(name, layer.weight, scheme)  # type: ignore[arg-type]
        if isinstance(layer, Prepared) and layer.local_mask is not None:
            check_zero(name, scheme)


def check_zero(name: str, scheme: Scheme) -> None:
    """Check that a scheme stores pruned weights, which are zeros, exactly."""
    if not scheme.has_zero:
        raise LayerError(
            f"{name}: a scheme for pruned weights must store zero exactly, got {scheme}; use"
            " gguf.q3_k, gguf.q6_k, gguf.q8_0 or gguf.q4_0"
        )


def check_axes(name: str, weight: Tensor) -> None:
    """Check that a weight is split over at most one mesh axis."""
    if isinstance(weight, DTensor) and weight.device_mesh.ndim != 1:
        raise OrderError(
            f"{name} is split over {weight.device_mesh.ndim} mesh axes; split linear layers over"
            " one axis, with ColwiseParallel or RowwiseParallel"
        )


def check_groups(name: str, weight: Tensor, scheme: Scheme) -> None:
    """Check that the scheme's group divides the rows of a weight, and each process's part."""
    features = weight.shape[-1]
    group = scheme.row_unit(features)
    input_group = group if scheme.activations is None else scheme.activations.group_size or group
    if features % group or features % input_group:
        group = group if features % group else input_group
        # Targets with a fixed group, such as llama.cpp's blocks of 32, have other schemes.
        groups = (16, 32, 64, 128, 256) if scheme.groups is None else scheme.groups
        valid_groups = [size for size in groups if features % size == 0]
        remedy = f"use a group of {', '.join(map(str, valid_groups))}, or " if valid_groups else ""
        raise LayerError(
            f"{name}: {scheme} has groups of {group} weights, which do not divide its rows of"
            f" {features}; {remedy}name the layer as an exception"
        )
    if not isinstance(weight, DTensor):
        return
    for axis, placement in enumerate(weight.placements):
        parts = weight.device_mesh.size(axis)
        if parts > 1 and placement.is_shard() and scheme.spans_rows:
            raise OrderError(
                f"{name}: {scheme} computes scales from the whole weight, but it is split over"
                f" {parts} processes; use a scheme with scales per row or group, such as"
                " ct.fp8_dynamic or ct.mxfp8, or do not split it"
            )
        if not placement.is_shard(1):
            continue
        if scheme.group_size is None:
            raise OrderError(
                f"{name}: {scheme} has one scale per row, but rows of {features} are split over"
                f" {parts} processes; use a scheme with groups, or fewer processes on that axis"
            )
        # A cut group would need a collective for its maximum in every forward.
        if features % (parts * group):
            raise OrderError(
                f"{name}: splitting rows of {features} over {parts} processes cuts groups of"
                f" {group}; split over at most {features // group} processes, a divisor of"
                f" {features // group}"
            )


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor; groups never cross processes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def drop_gathered(model: nn.Module) -> None:
    """Reshard FSDP parameters that a forward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _factor(weight: Tensor, scheme: Scheme) -> nn.Parameter:
    """Create the parameter of learned scales: zeros (R, G), with the layout of the weight."""
    # log of a multiplier: 0 leaves scales as they are
    local = local_part(weight)
    zeros = local.new_zeros(scheme.factor_shape(*local.shape), dtype=torch.float32)
    if not isinstance(weight, DTensor):
        return nn.Parameter(zeros)
    rows, features = weight.shape
    return nn.Parameter(_with_layout_of(zeros, weight, scheme.factor_shape(rows, features)))


def _pattern(name: str) -> str:
    """Return a pattern that matches this layer in every block."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _part(mask: Tensor, weight: Tensor) -> Tensor:
    """Return this process's part of a whole mask, split like its weight."""
    if not isinstance(weight, DTensor):
        return mask
    (chunk,) = weight.__create_chunk_list__()  # type: ignore[no-untyped-call]
    box = zip(chunk.offsets, chunk.sizes, strict=True)  # this rank's rectangle of the weight
    return mask[tuple(slice(start, start + size) for start, size in box)].clone()


def _with_layout_of(local: Tensor, like: DTensor, shape: tuple[int, ...]) -> Tensor:
    """Create a 2D DTensor with the layout of `like` from its local part."""
    out: Tensor = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )
    return out


def _split_linear(layer: PreparedLinear, x: Tensor) -> Tensor:
    """Compute a linear layer on this process's part of its weight, split over one mesh axis.

    Rows of the weight split (column parallel): each process has the whole input and its part of the
    output. Columns split (row parallel): the input's features are split too, and the outputs are
    partial sums that the caller reduces.
    """
    weight: Any = layer.weight
    mesh = weight.device_mesh
    if mesh.ndim != 1 or not isinstance(x, DTensor):
        raise OrderError(
            f"{layer.layer_name}: the weight must be split over one mesh axis and the input a"
            f" DTensor, got {mesh.ndim} axes and {type(x).__name__}; split linear layers with"
            " ColwiseParallel or RowwiseParallel"
        )
    by_columns = weight.placements[0].is_shard(1)
    by_rows = weight.placements[0].is_shard(0)
    layer.compute_dtype = weight.dtype
    # Row parallel: a rank has some of the features. Column parallel: it has all of them.
    input_placement = Shard(x.ndim - 1) if by_columns else Replicate()
    grad_placement = Shard(x.ndim - 1) if by_columns else (Partial() if by_rows else Replicate())
    local_x = x.redistribute(placements=[input_placement]).to_local(
        grad_placements=[grad_placement]
    )
    # With split features, a token's largest value is a maximum over the ranks.
    reduce_max = max_over_group(mesh.get_group()) if by_columns and layer.activations else None
    # Partial sums are reduced first, or every rank would add the bias.
    adds_bias_later = by_columns and isinstance(layer.bias, DTensor)
    local_bias = None if layer.bias is None or adds_bias_later else local_part(layer.bias)
    out = fake_linear(
        local_x,
        weight.to_local(),
        layer.rule,
        factor=None if layer.factor is None else local_part(layer.factor),
        mask=layer.mask,
        bias=local_bias,
        reduce_max=reduce_max,
        input_peak=layer.observe(local_x, reduce_max),
    )
    output_placement = Partial() if by_columns else (Shard(x.ndim - 1) if by_rows else Replicate())
    result: Any = DTensor.from_local(out, mesh, [output_placement], run_check=False)
    if by_columns and layer.bias is not None:
        result = result.redistribute(placements=[Replicate()]) + layer.bias
    return result  # type: ignore[no-any-return]
