"""Linear layers and experts with low-rank adapters.

LoRA (Hu et al., 2021): y = W·x + s·B·(A·x). DoRA (Liu et al., 2024): W + s·B·A is rescaled so that
row o has the trained norm m_o. Only A, B and m are trained.
PiSSA and OLoRA start from factors B₀·A₀ of W and train W + s·(B·A - B₀·A₀); W itself is unchanged,
so the model without adapters is always the base model.
Shapes: r rank, I inputs, O outputs of a layer, E experts, T rows sorted by expert.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ms_align.lora.initialization import INITIAL_ADAPTERS
from ms_align.lora.options import LoraOptions
from ms_align.lora.quantized_base import QuantizedExperts, QuantizedLinear


class AdapterTensors(NamedTuple):
    """Trained tensors of one layer."""

    a: Tensor
    """(r, I); of experts (E, r, I)."""
    b: Tensor
    """(O, r); of experts (E, O, r)."""
    magnitude: Tensor | None = None
    """Norm (O,) of each row of the weight, with DoRA."""

    def cpu(self) -> "AdapterTensors":
        """Return the tensors on the CPU."""
        magnitude = self.magnitude
        return AdapterTensors(
            self.a.cpu(), self.b.cpu(), None if magnitude is None else magnitude.cpu()
        )


class AdaptedLayer(nn.Module):
    """Frozen layer with a trainable A (..., r, I) and B (..., O, r).

    Args:
        base: layer to adapt; it is frozen. Its weight is (O, I), or (E, O, I) with any number of
            output dims.
        options: adapter settings.
        quantized: wraps the layer if `quantize_base` is set.
    """

    def __init__(
        self, base: Any, options: LoraOptions, quantized: Callable[[Any, str], nn.Module]
    ) -> None:
        super().__init__()
        base.requires_grad_(False)
        weight = base.weight
        factory: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        *leading, inputs = weight.shape
        experts, outputs = leading[: self.expert_dims], leading[self.expert_dims :]
        self.options, self.scale = options, options.scale
        self.lora_A = nn.Parameter(torch.empty((*experts, options.rank, inputs), **factory))
        self.lora_B = nn.Parameter(torch.empty((*experts, *outputs, options.rank), **factory))
        magnitude = nn.Parameter(torch.empty(outputs, **factory)) if options.use_dora else None
        self.lora_magnitude_vector = magnitude
        self.register_buffer("initial_A", None, persistent=False)
        self.register_buffer("initial_B", None, persistent=False)
        base_format = options.quantize_base
        self.base_layer: Any = base if base_format == "none" else quantized(base, base_format)
        self.initialize(0)
        self.enabled = True
        self.dropout_generator: torch.Generator | None = None
        """Random numbers of dropout during a training pass; None elsewhere."""
        self._original_weight: Tensor | None = None
        self._quantized: list[Any] = []
        """The quantized layer while its weight is merged; in a list, to stay unregistered."""

    expert_dims = 0
    """Number of leading expert dims of the weight."""

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set the initial adapter: A uniform in ±1/√I and B 0, as peft does, or factors of W."""
        factors = INITIAL_ADAPTERS.get(self.options.init_lora_weights)
        if factors is None:
            generator = torch.Generator().manual_seed(seed)
            # Kaiming uniform with a = √5, as in nn.Linear.
            bound = 1.0 / math.sqrt(self.lora_A.shape[-1])
            # Drawn on the CPU, so that all devices get the same values.
            draws = torch.rand(self.lora_A.shape, generator=generator)
            self.lora_A.copy_(draws * 2 * bound - bound)
            self.lora_B.zero_()
        else:
            # (E, O, I) with flat outputs, since B's rows are the weight's.
            weight = full(self.base_layer.weight).detach().float()
            flat = weight.flatten(self.expert_dims, -2)
            a, b = factors(flat, self.options.rank, self.scale)
            self.lora_A.copy_(a)
            self.lora_B.copy_(b.view(self.lora_B.shape))
            self.initial_A, self.initial_B = self.lora_A.clone(), self.lora_B.clone()
        if self.lora_magnitude_vector is not None:
            self.lora_magnitude_vector.copy_(row_norms(full(self.base_layer.weight)))

    @property
    def bias(self) -> Tensor | None:
        """Bias of the base layer."""
        return cast("Tensor | None", self.base_layer.bias)

    @property
    def weight(self) -> Tensor:
        """Effective weight, of the base weight's shape."""
        weight: Tensor = self.base_layer.weight
        if not self.enabled or self.merged:
            return weight
        adapted = weight + self.delta().to(weight.dtype)
        if self.lora_magnitude_vector is None:
            return adapted
        return (self.lora_magnitude_vector / row_norms(adapted))[:, None] * adapted

    @property
    def merged(self) -> bool:
        """True if the adapter is merged into the layer's weight."""
        return self._original_weight is not None or bool(self._quantized)

    def delta(self) -> Tensor:
        """Compute s·(B·A - B₀·A₀), of the base weight's shape."""
        difference = low_rank_product(full(self.lora_A), full(self.lora_B))
        if self.initial_A is not None:
            difference = difference - low_rank_product(full(self.initial_A), full(self.initial_B))
        return self.scale * difference

    def tensors(self) -> AdapterTensors:
        """Return the adapter as one product of matrices, as stored in files.

        PiSSA's and OLoRA's factors are included, which doubles the rank:
        [B, -B₀]·[A; A₀] = B·A - B₀·A₀.
        """
        a, b = full(self.lora_A).detach(), full(self.lora_B).detach().flatten(self.expert_dims, -2)
        if self.initial_A is not None:
            initial_b = full(self.initial_B).flatten(self.expert_dims, -2)
            a, b = torch.cat((a, full(self.initial_A)), -2), torch.cat((b, -initial_b), -1)
        magnitude = self.lora_magnitude_vector
        return AdapterTensors(a, b, None if magnitude is None else full(magnitude).detach())

    @torch.no_grad()
    def load(self, tensors: AdapterTensors) -> None:
        """Copy tensors of this layer's rank, such as tensors read from a file."""
        self.lora_A.copy_(tensors.a)
        self.lora_B.copy_(tensors.b.reshape(self.lora_B.shape))
        if self.lora_magnitude_vector is not None and tensors.magnitude is not None:
            self.lora_magnitude_vector.copy_(tensors.magnitude)

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapter into the weight, keeping a copy of the original."""
        if self.merged:
            return
        base = self.base_layer
        if isinstance(base, QuantizedLinear | QuantizedExperts):
            # The merged weight is stored in full; `unmerge` goes back to the quantized one.
            merged = self.weight
            self._quantized = [base]
            self.base_layer = base.plain(merged)
            return
        weight = base.weight
        merged = full(weight) + self.delta()
        if self.lora_magnitude_vector is not None:
            merged *= (full(self.lora_magnitude_vector) / row_norms(merged))[:, None]
        # A copy, as subtracting the delta would not restore every bit.
        original = weight.clone()
        if isinstance(weight, DTensor):
            # Every rank computes the same weight and takes its shard without communication.
            mesh, placements = weight.device_mesh, weight.placements
            weight.copy_(distribute_tensor(merged, mesh, placements, src_data_rank=None))
        else:
            weight.copy_(merged)
        self._original_weight = original

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restore the original weight, bit for bit."""
        if self._original_weight is not None:
            self.base_layer.weight.copy_(self._original_weight)
            self._original_weight = None
        if self._quantized:
            self.base_layer = self._quantized.pop()
            if isinstance(self.base_layer, QuantizedExperts):
                self.base_layer.release()


class LoraLinear(AdaptedLayer):
    """Linear layer with an adapter.

    Args:
        base: layer to adapt; it is frozen.
        options: adapter settings.
    """

    def __init__(self, base: nn.Linear, options: LoraOptions) -> None:
        super().__init__(base, options, QuantizedLinear)
        self.product: Callable[[Tensor, Tensor, Tensor], Tensor] = linear_product
        """Computes B·(A·x) from x (..., I), A and B; replaced if A and B are split."""

    @property
    def in_features(self) -> int:
        """Number of inputs, I."""
        return self.lora_A.shape[1]

    @property
    def out_features(self) -> int:
        """Number of outputs, O."""
        return self.lora_B.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, and the adapter unless disabled or merged, (..., I) to (..., O)."""
        y: Tensor = self.base_layer(x)
        if not self.enabled or self.merged:
            return y
        inputs = self._dropout(x)
        # FSDP casts only the base layer under mixed precision; the adapter stays in float32.
        dtype = x.dtype
        a, b = local(self.lora_A).to(dtype), (self.scale * local(self.lora_B)).to(dtype)
        update = self.product(inputs, a, b)
        if self.initial_A is not None:
            a, b = local(self.initial_A).to(dtype), (self.scale * local(self.initial_B)).to(dtype)
            update = update - self.product(inputs, a, b)
        if self.lora_magnitude_vector is None:
            return y + update
        # Section 4.3 of the paper: the norm is a constant in the backward pass.
        weight = self.base_layer.weight.to(dtype)
        norms = row_norms(weight + self.delta().to(dtype)).detach()
        ratio = (self.lora_magnitude_vector / norms).to(dtype)  # (O,)
        if inputs is not x:
            product = F.linear(inputs, weight)
        else:
            product = y if self.bias is None else y - self.bias.to(dtype)
        return y + (ratio - 1) * product + ratio * update

    def _dropout(self, x: Tensor) -> Tensor:
        generator, rate = self.dropout_generator, self.options.dropout
        if generator is None or rate == 0.0:
            return x
        keep = torch.rand(x.shape, generator=generator, device=x.device) >= rate
        return x * (keep.to(x.dtype) / (1.0 - rate))


class LoraGroupedLinear(AdaptedLayer):
    """One linear map per expert, each with its own adapter.

    Args:
        base: grouped linear map of ms-parallel, or an `ExpertWeight`; it is frozen.
        options: adapter settings.
    """

    expert_dims = 1

    def __init__(self, base: nn.Module, options: LoraOptions) -> None:
        super().__init__(base, options, QuantizedExperts)
        self.interleaved = bool(getattr(base, "interleaved", False))
        """Gate and up rows alternate in transformers' weight, but not in the base layer's."""
        ops = getattr(base, "ops", None)  # the model's operators
        self.multiply = grouped_matmul if ops is None else ops.grouped_matmul
        """Multiplies rows (T, I), sorted by expert, by matrices (E, I, O)."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (T, I), sorted by expert with `counts` (E,), to (T, O)."""
        y: Tensor = self.base_layer(rows, counts)
        if not self.enabled or self.merged:
            return y
        y = y + self._update(rows, counts, self.lora_A, self.lora_B)
        if self.initial_A is not None:
            y = y - self._update(rows, counts, self.initial_A, self.initial_B)
        return y

    def _update(self, rows: Tensor, counts: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute s·B·(A·x) of each row with its expert's A and B, (T, O)."""
        a = local(a).to(rows.dtype).transpose(1, 2)  # (E, I, r)
        b = (self.scale * local(b)).to(rows.dtype).flatten(1, -2).transpose(1, 2)  # (E, r, O)
        return cast(Tensor, self.multiply(self.multiply(rows, a, counts), b, counts))

    def tensors(self) -> AdapterTensors:
        """Return the adapter with B's rows in the order of transformers' weight."""
        a, b, _ = super().tensors()
        if self.interleaved:
            b = b.view(len(b), 2, -1, b.shape[2]).transpose(1, 2).flatten(1, 2)
        return AdapterTensors(a, b)

    def load(self, tensors: AdapterTensors) -> None:
        """Copy tensors of this layer's rank, such as tensors read from a file."""
        a, b, _ = tensors
        if self.interleaved:
            b = b.reshape(len(b), -1, 2, b.shape[2]).transpose(1, 2).flatten(1, 2)
        super().load(AdapterTensors(a, b))


class ExpertWeight(nn.Module):
    """One stacked weight of a transformers experts module, as a grouped linear map.

    Args:
        experts: module with the parameters; not registered as a submodule.
        name: name of the weight, such as `down_proj`.
    """

    experts: Any

    def __init__(self, experts: nn.Module, name: str) -> None:
        super().__init__()
        self.__dict__["experts"], self.name = experts, name
        self.shape = cast(Tensor, experts._parameters[name]).shape

    @property
    def weight(self) -> Tensor:
        """View of the weight, (E, O, I)."""
        stacked = cast(Tensor, self.experts._parameters[self.name])
        # ms-parallel stores gate and up in separate dims, (E, 2, O / 2, I).
        matrices = stacked.flatten(1, -2)
        return matrices.transpose(1, 2) if self.experts.is_transposed else matrices

    def set_weight(self, value: Tensor) -> None:
        """Replace the weight with a tensor of shape (E, O, I)."""
        stacked = value.transpose(1, 2) if self.experts.is_transposed else value
        if stacked.numel() == self.shape.numel():
            stacked = stacked.reshape(self.shape)
        self.experts._parameters[self.name] = nn.Parameter(stacked, requires_grad=False)

    @property
    def bias(self) -> Tensor | None:
        """Bias (E, O), if the experts have one."""
        bias: Tensor | None = self.experts._parameters.get(f"{self.name}_bias")
        return bias

    def requires_grad_(self, requires_grad: bool = True) -> "ExpertWeight":
        """Freeze or unfreeze the weight and its bias."""
        for name in (self.name, f"{self.name}_bias"):
            parameter = self.experts._parameters.get(name)
            if parameter is not None:
                parameter.requires_grad_(requires_grad)
        return self

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (T, I), sorted by expert with `counts` (E,), to (T, O)."""
        y = grouped_matmul(rows, self.weight.to(rows.dtype).transpose(1, 2), counts)
        return y if self.bias is None else y + self.bias.repeat_interleave(counts, 0)


class LoraExperts(nn.Module):
    """Experts module of transformers whose two weights may have adapters.

    The routed rows are sorted by expert, and both weights are applied as grouped products, so that
    an expert's adapter is applied to its rows only and no adapted weight is stored.

    Args:
        base: experts module decorated with transformers' `use_experts_implementation`.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        for name in stacked_weights(base):
            self.add_module(name, ExpertWeight(base, name))

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Map hidden (N, H), experts (N, k) and their weights (N, k) to (N, H)."""
        base: Any = self.base_layer
        first, down = (self.get_submodule(name) for name in stacked_weights(base))
        choices = experts.shape[-1]
        ids, order = experts.flatten().sort(stable=True)
        counts = torch.zeros(base.num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, ids, torch.ones_like(ids))
        rows = first(hidden[order // choices], counts)  # (N·k, gate and up)
        rows = base._apply_gate(rows) if base.has_gate else base.act_fn(rows)
        rows = down(rows, counts) * weights.flatten()[order, None]  # (N·k, H)
        # Back to the order of tokens, then a sum over each token's choices.
        out = torch.empty_like(rows).index_copy(0, order, rows)
        return out.view(-1, choices, out.shape[-1]).sum(1).to(hidden.dtype)


def stacked_weights(module: Any) -> tuple[str, ...]:
    """Return the names of the stacked weights of a transformers experts module; else ()."""
    flags = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "num_experts")
    if not all(hasattr(module, name) for name in flags):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    stacked = all(getattr(module._parameters.get(name), "ndim", 0) >= 3 for name in names)
    return names if stacked and not getattr(module, "has_post_expert_norm", False) else ()


def is_grouped_linear(module: nn.Module) -> bool:
    """Return True for ms-parallel's grouped linear maps, recognized by their attributes."""
    weight = module._parameters.get("weight")
    grouped = hasattr(getattr(module, "ops", None), "grouped_matmul")
    return grouped and weight is not None and weight.ndim >= 3


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows (T, I) by its matrix in weights (E, I, O), to (T, O)."""
    aligned = all(size * rows.dtype.itemsize % 16 == 0 for size in weights.shape[1:])
    # torch's grouped kernel takes neither float64 nor rows that are not a multiple of 16 bytes.
    if rows.dtype == torch.float64 or not aligned or not rows.numel():
        parts = torch.split(rows, counts.tolist())
        return torch.cat([part @ matrix for part, matrix in zip(parts, weights, strict=True)])
    return F.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))


def linear_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute B·(A·x) for x (..., I), A (r, I) and B (O, r)."""
    return F.linear(F.linear(x, a), b)


def low_rank_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute B·A, (..., outputs, I), for A (..., r, I) and B (..., outputs, r)."""
    if b.ndim == a.ndim:
        return b @ a
    return (b.flatten(1, -2) @ a).view(*b.shape[:-1], a.shape[-1])  # (E, *outputs, I)


def row_norms(weight: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, (O,) of (O, I)."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms


def full(tensor: Any) -> Tensor:
    """Return the full tensor; collective if it is split over processes."""
    gathered: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, differentiably."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
