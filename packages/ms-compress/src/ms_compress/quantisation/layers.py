"""Layers that compute as a target will: `nn.Linear` and `nn.Embedding`, prepared in place.

A prepared layer is the same object with the same parameters under the same names, of a subclass:
hooks, ties, checkpoints and the plans of how a model splits know it as before. Under tensor
parallelism its weight is a DTensor, and it computes on its own part: a group never crosses a
boundary between processes, which is checked when the layer is prepared or its weight is split.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from ms_compress.errors import LayerError, OrderError
from ms_compress.quantisation.fake_quantisation import Rule, fake_linear, fake_weight, largest_over
from ms_compress.quantisation.scheme import Activations, Scheme

FACTOR = "scale_factor"
"""Name of the parameter (N, G) whose exponential multiplies the scales, where they are learned."""


class Prepared(nn.Module):
    """Base of the layers that compute as their target will."""

    weight: Tensor
    scheme: Scheme | None
    activations: Activations | None
    quantising: bool
    """False in the float part of a float-then-quantised schedule."""
    layer_name: str
    own_mask: Tensor | None
    """The mask, on whatever device it was last used. No buffer: it outlives `to_empty`, and what
    is stored are the zeros themselves."""
    input_ndim: int | None
    """Number of dims that every input must have, None for any. compressed-tensors keeps one input
    scale per index of the first two dims, which is one per token for (B, S, K) alone."""
    computed_in: torch.dtype | None
    """Dtype of the weight in the last forward. Under mixed precision it is narrower than the stored
    one, and codes are those of the narrower weight: export rounds likewise."""

    @property
    def rule(self) -> Rule:
        """What the layer does to weight and input at present."""
        on = self.quantising
        return Rule(
            scheme=self.scheme if on else None, activations=self.activations if on else None
        )

    @property
    def factor(self) -> Tensor | None:
        """(N, G), or None where scales are the scheme's own."""
        return self._parameters.get(FACTOR)

    @property
    def mask(self) -> Tensor | None:
        """(N, K) bool of this process's tensor-parallel part, or None."""
        if self.own_mask is not None and self.own_mask.device != self.weight.device:
            self.own_mask = self.own_mask.to(self.weight.device)
        return self.own_mask

    @property
    def stored_mask(self) -> Tensor | None:
        """Bool of the weights that this process stores: under FSDP, its shard of `mask`."""
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
        for offset, held, whole in zip(chunks[0].offsets, mask.shape, weight.shape, strict=True):
            # The mesh's last axis is tensor parallelism's, whose parts but the last are of a size.
            part = whole if held == whole else -(-whole // weight.device_mesh.size(-1))
            starts.append(offset % part)
        return mask[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]

    def set_mask(self, kept: Tensor) -> None:
        """Mask the layer.

        Args:
            kept: (N, K) bool of the whole weight, True for weights that stay.
        """
        self.own_mask = _part(kept, self.weight)

    @property
    def is_narrowed(self) -> bool:
        """Whether forwards have float32 parameters in a narrower dtype."""
        return self.weight.dtype == torch.float32 and self.computed_in not in (None, torch.float32)

    def as_computed(self, kept: Tensor) -> Tensor:
        """Cast part of a stored parameter of this layer to the dtype that forwards have."""
        return kept.to(self.computed_in) if self.is_narrowed else kept

    def effective_weight(self) -> Tensor:
        """Return what is computed with in the weight's place, (N, K), laid out as the weight is."""
        weight = self.weight
        self.computed_in = weight.dtype
        if not isinstance(weight, DTensor):
            return fake_weight(weight, self.rule, self.factor, self.mask)
        factor = None if self.factor is None else local_part(self.factor)
        rounded = fake_weight(weight.to_local(), self.rule, factor, self.mask)
        return _laid_out(rounded, weight, tuple(weight.shape))

    def register_parameter(self, name: str, param: Any) -> None:
        """Register it as `nn.Module` does, but refuse a split that cuts a weight group in two."""
        if isinstance(param, DTensor) and "layer_name" in self.__dict__:
            self._check_split(name, param)
        super().register_parameter(name, param)

    def _check_split(self, name: str, param: Any) -> None:
        if name == "weight" and self.scheme is not None:
            check_groups(self.layer_name, param, self.scheme)
        weight: Any = self.weight
        # A weight that was split already is replaced by its like, as load_state_dict does.
        split_now = name == "weight" and not isinstance(weight, DTensor)
        if split_now:
            check_axes(self.layer_name, param)
        if split_now and self.own_mask is not None and self.own_mask.shape == param.shape:
            self.own_mask = _part(self.own_mask, param)
        if name == FACTOR and isinstance(weight, DTensor) and param.placements != weight.placements:
            raise OrderError(
                f"{self.layer_name}: its weight is split as {weight.placements}, its learned scales"
                f" as {param.placements}; split the model first, then prepare it"
            )


class PreparedLinear(Prepared, nn.Linear):
    """A linear layer that computes as its target will."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N)."""
        if self.input_ndim not in (None, x.ndim) and self.activations is not None:
            raise LayerError(
                f"{self.layer_name}: {self.scheme} rounds inputs of shape (B, S, K) with one scale"
                f" per token, and this layer's input is {tuple(x.shape)}, for which"
                " compressed-tensors shares scales between tokens; name the layer as an exception,"
                f" such as {_pattern(self.layer_name)!r}"
            )
        if isinstance(self.weight, DTensor):
            return _split_linear(self, x)
        self.computed_in = self.weight.dtype
        return fake_linear(
            x, self.weight, self.rule, factor=self.factor, mask=self.mask, bias=self.bias
        )


class PreparedEmbedding(Prepared, nn.Embedding):
    """An embedding whose rows are those that its target holds."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (...) int64 to (..., K)."""
        if isinstance(self.weight, DTensor) or self.factor is not None or self.mask is not None:
            weight = self.effective_weight()
            often = self.scale_grad_by_freq
            return F.embedding(tokens, weight, self.padding_idx, scale_grad_by_freq=often)
        self.computed_in = self.weight.dtype
        # Rows are rounded one by one, so those that are looked up are all that need it.
        rows = super().forward(tokens)
        return fake_weight(rows.flatten(0, -2), self.rule).view(rows.shape)


KINDS: dict[type[nn.Module], type[Prepared]] = {
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
    """Make a layer compute as a scheme's target will, in place; None only lets it take a mask.

    Raises:
        LayerError: it is of no kind that can be prepared, or a group does not divide its rows.
        OrderError: it was sharded or split in a way in which this cannot be right.
    """
    check_layer(layer, name, scheme)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if not isinstance(layer, Prepared):
        # The same object under a subclass, as fully_shard does: hooks, ties and names stay.
        layer.__class__ = KINDS[type(layer)]
        layer.scheme = layer.activations = layer.own_mask = None  # type: ignore[assignment]
        layer.computed_in = layer.input_ndim = None  # type: ignore[assignment]
    assert isinstance(layer, Prepared)
    layer.quantising, layer.layer_name = True, name
    if scheme is not None:
        layer.scheme, layer.activations = scheme, activations
        if learned_scales and layer.factor is None:
            layer.register_parameter(FACTOR, _factor(weight, scheme))
    return layer


def prepared_layers(model: nn.Module) -> Iterator[tuple[str, Prepared]]:
    """Yield names and prepared layers of a model."""
    for name, layer in model.named_modules():
        if isinstance(layer, Prepared):
            yield name, layer


def check_layer(layer: nn.Module, name: str, scheme: Scheme | None) -> None:
    """Raise what `prepare_layer` would, and change nothing."""
    if isinstance(layer, Prepared):
        if scheme is not None and layer.scheme is not None and layer.scheme != scheme:
            raise LayerError(
                f"{name} is already prepared for {layer.scheme}; prepare the model once, naming"
                " all layers of another scheme as exceptions"
            )
    elif isinstance(layer, FSDPModule):
        raise OrderError(
            f"{name} is wrapped by fully_shard on its own; prepare the model before it is sharded"
        )
    elif type(layer) not in KINDS:
        raise LayerError(
            f"{name} must be an nn.Linear or nn.Embedding, got {type(layer).__name__}; add it to"
            " the exceptions"
        )
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        raise LayerError(
            f"{name} has max_norm={layer.max_norm}, by which a forward changes its weight; name it"
            " as an exception"
        )
    if scheme is not None:
        check_groups(name, layer.weight, scheme)  # type: ignore[arg-type]


def check_axes(name: str, weight: Tensor) -> None:
    """Refuse a weight that is split over more axes of processes than one."""
    if isinstance(weight, DTensor) and weight.device_mesh.ndim != 1:
        raise OrderError(
            f"{name} is split over {weight.device_mesh.ndim} axes of processes; split linear layers"
            " over one, with ColwiseParallel or RowwiseParallel"
        )


def check_groups(name: str, weight: Tensor, scheme: Scheme) -> None:
    """Refuse rows that the scheme's group does not divide, whole or as they are split."""
    features = weight.shape[-1]
    group = scheme.group_of(features)
    if features % group:
        # A target with fixed groups, such as llama.cpp's blocks of 32, offers no other one.
        groups = (16, 32, 64, 128, 256) if scheme.groups is None else scheme.groups
        fits = [g for g in groups if features % g == 0]
        remedy = f"groups that fit: {', '.join(map(str, fits))}, or " if fits else ""
        raise LayerError(
            f"{name}: {scheme} groups {group} weights, which do not divide rows of {features};"
            f" {remedy}name the layer as an exception"
        )
    if not isinstance(weight, DTensor):
        return
    for axis, placement in enumerate(weight.placements):
        if not placement.is_shard(1):
            continue
        parts = weight.device_mesh.size(axis)
        if scheme.group is None:
            raise OrderError(
                f"{name}: {scheme} has one scale a row, and rows of {features} are split over"
                f" {parts} processes; use a scheme with groups, or fewer processes on that axis"
            )
        if features % (parts * group):
            raise OrderError(
                f"{name}: rows of {features} split over {parts} processes cut groups of {group};"
                f" split over at most {features // group} processes that divide"
                f" {features // group}"
            )


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor; groups of weights never cross processes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def drop_gathered(model: nn.Module) -> None:
    """Make parameters FSDP's own shards again, where a forward left gathered copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _factor(weight: Tensor, scheme: Scheme) -> nn.Parameter:
    """Make the parameter of learned scales: zeros (N, G), laid out as the weight is."""
    group = scheme.group_of(weight.shape[1])
    local = local_part(weight)
    zeros = local.new_zeros(local.shape[0], local.shape[1] // group, dtype=torch.float32)
    if not isinstance(weight, DTensor):
        return nn.Parameter(zeros)
    return nn.Parameter(_laid_out(zeros, weight, (weight.shape[0], weight.shape[1] // group)))


def _pattern(name: str) -> str:
    """Return a pattern that matches this layer in every block."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _part(mask: Tensor, weight: Tensor) -> Tensor:
    """Return this process's part of a whole mask, as its weight is split."""
    if not isinstance(weight, DTensor):
        return mask
    (chunk,) = weight.__create_chunk_list__()  # type: ignore[no-untyped-call]
    box = zip(chunk.offsets, chunk.sizes, strict=True)
    return mask[tuple(slice(start, start + size) for start, size in box)].clone()


def _laid_out(local: Tensor, like: DTensor, shape: tuple[int, ...]) -> Tensor:
    """Make a DTensor of a shape from its local part, laid out as another one of two dims."""
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
    """Compute a linear layer on this process's part of its weight, on one axis of processes.

    Rows split: every process has the whole input, and its part of the output. Columns split: the
    input's features are split likewise, and outputs are summed by whoever asks for the whole.
    """
    weight: Any = layer.weight
    mesh = weight.device_mesh
    if mesh.ndim != 1 or not isinstance(x, DTensor):
        raise OrderError(
            f"{layer.layer_name}: its weight is a DTensor on {mesh.ndim} axes and its input a"
            f" {type(x).__name__}; split linear layers with ColwiseParallel or RowwiseParallel"
        )
    by_columns = weight.placements[0].is_shard(1)
    by_rows = weight.placements[0].is_shard(0)
    layer.computed_in = weight.dtype
    wanted = Shard(x.ndim - 1) if by_columns else Replicate()
    flow = Shard(x.ndim - 1) if by_columns else (Partial() if by_rows else Replicate())
    local_x = x.redistribute(placements=[wanted]).to_local(grad_placements=[flow])
    largest = largest_over(mesh.get_group()) if by_columns and layer.activations else None
    summed = by_columns and isinstance(layer.bias, DTensor)
    local_bias = None if layer.bias is None or summed else local_part(layer.bias)
    out = fake_linear(
        local_x,
        weight.to_local(),
        layer.rule,
        factor=None if layer.factor is None else local_part(layer.factor),
        mask=layer.mask,
        bias=local_bias,
        largest=largest,
    )
    placed = Partial() if by_columns else (Shard(x.ndim - 1) if by_rows else Replicate())
    result: Any = DTensor.from_local(out, mesh, [placed], run_check=False)
    if by_columns and layer.bias is not None:
        result = result.redistribute(placements=[Replicate()]) + layer.bias
    return result  # type: ignore[no-any-return]
