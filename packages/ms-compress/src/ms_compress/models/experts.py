"""Fused experts as separate linear layers, which every method can quantize and calibrate.

Models store the matrices of all experts of a layer in two tensors. As linear layers, experts get
separate calibration statistics, and the same names as in most checkpoints.
Shapes: T tokens, k experts per token, H hidden, E experts, I expert width.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ms_compress.arguments import check_type
from ms_compress.errors import LayerError

M = TypeVar("M", bound=nn.Module)
MATRICES = ("gate_proj", "up_proj", "down_proj")
CHECKPOINT_NAMES = {
    "mixtral": (".block_sparse_moe.experts.", dict(zip(MATRICES, ("w1", "w3", "w2"), strict=True)))
}
"""Path of the experts and names of their matrices in checkpoints with other names."""


class Expert(nn.Module):
    """Gated feed-forward of one expert."""

    def __init__(
        self, matrices: Mapping[str, Tensor], gate: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        for name, matrix in matrices.items():
            rows, features = matrix.shape
            linear = nn.Linear(features, rows, bias=False, device="meta")
            linear.weight = nn.Parameter(matrix.detach(), requires_grad=matrix.requires_grad)
            self.add_module(name, linear)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, H) to (T, H)."""
        gate, up, down = (self.get_submodule(name) for name in MATRICES)
        out: Tensor = down(self.gate(gate(x), up(x)))
        return out


class SeparateExperts(nn.Module):
    """Experts of a layer as modules `0`, `1`, ..., with the signature of the fused experts.

    Args:
        experts: the experts, whose weights are views of the fused tensors.
        fused: the module that they replace.
    """

    def __init__(self, experts: list[Expert], fused: nn.Module) -> None:
        super().__init__()
        for index, expert in enumerate(experts):
            self.add_module(str(index), expert)
        self.count = len(experts)
        self._fused = (fused,)  # in a tuple, so that it is not a submodule

    @property
    def fused(self) -> nn.Module:
        """The module that the experts replace."""
        return self._fused[0]

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden: (..., H).
            experts: (..., k) int64 indices.
            weights: (..., k).
        """
        tokens = hidden.flatten(0, -2)  # (T, H)
        indices, scores = experts.flatten(0, -2), weights.flatten(0, -2)  # (T, k)
        out = torch.zeros_like(tokens)
        for index in sorted(set(indices.flatten().tolist())):
            if not 0 <= index < self.count:  # a dropped token
                continue
            rows, slots = torch.where(indices == index)  # (n,) each: this expert's tokens
            result = self.get_submodule(str(index))(tokens[rows])  # (n, H)
            result = result * scores[rows, slots].unsqueeze(-1)
            out = out.index_add(0, rows, result.to(out.dtype))
        return out.view_as(hidden)


def separate_experts(model: M) -> M:
    """Replace a model's fused experts by separate linear layers, in place; weights are not copied.

    Args:
        model: a complete model of ms-parallel or transformers, in one process.

    Returns:
        The same model; models without fused experts are unchanged.

    Raises:
        LayerError: experts are split over processes, or have biases (as in gpt-oss).
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    for name, module in list(model.named_modules()):
        if not is_fused(module):
            continue
        parent, _, attribute = name.rpartition(".")
        separate = SeparateExperts(list(_experts(name, module)), module)
        separate.train(module.training)
        setattr(model.get_submodule(parent), attribute, separate)
    return model


def fuse_experts(model: nn.Module) -> None:
    """Undo `separate_experts` in place, with the weights that the separate experts have now."""
    for name, separate in list(separated(model)):
        fused = separate.fused
        with torch.no_grad():
            for expert, target in zip(separate.children(), _experts(name, fused), strict=True):
                for matrix in MATRICES:
                    weight = expert.get_submodule(matrix).get_parameter("weight")
                    target.get_submodule(matrix).get_parameter("weight").copy_(weight)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, fused.train(separate.training))


def separated(model: nn.Module) -> Iterator[tuple[str, SeparateExperts]]:
    """Yield the names and modules of separate experts."""
    for name, module in model.named_modules():
        if isinstance(module, SeparateExperts):
            yield name, module


def routers(model: nn.Module) -> set[str]:
    """Return the names of the routers of separate experts that are not linear layers."""
    return {
        f"{name.rpartition('.')[0]}.{child}"
        for name, _ in separated(model)
        for child, module in model.get_submodule(name.rpartition(".")[0]).named_children()
        if child in ("gate", "router") and not isinstance(module, nn.Linear)
    }


def checkpoint_names(model: nn.Module, family: str) -> dict[str, str]:
    """Return the checkpoint's names of separate experts' matrices, if they differ."""
    if family not in CHECKPOINT_NAMES:
        return {}
    path, matrices = CHECKPOINT_NAMES[family]
    names = {}
    for name, experts in separated(model):
        block = name.removesuffix(".mlp.experts")
        for index in range(experts.count):
            for matrix, stored in matrices.items():
                names[f"{name}.{index}.{matrix}.weight"] = f"{block}{path}{index}.{stored}.weight"
    return names


def is_fused(module: nn.Module) -> bool:
    """Return True if a module stores the matrices of all experts in two tensors."""
    matrices = [_matrix(module, name) for name in ("gate_up_proj", "down_proj")]
    return all(matrix is not None and matrix.ndim >= 3 for matrix in matrices)


def _matrix(module: nn.Module, name: str) -> Tensor | None:
    """Return a fused matrix: a parameter in transformers, the weight of a module in ms-parallel."""
    value: Any = getattr(module, name, None)
    weight = getattr(value, "weight", None) if isinstance(value, nn.Module) else value
    return weight if isinstance(weight, Tensor) else None


def _experts(name: str, module: nn.Module) -> Iterator[Expert]:
    gate_up, down = _matrix(module, "gate_up_proj"), _matrix(module, "down_proj")
    assert gate_up is not None
    assert down is not None
    if isinstance(gate_up, DTensor):
        raise LayerError(
            f"{name}: its experts are split over processes; quantize the model in one process"
        )
    owner: Any = module
    biases = [getattr(getattr(owner, "gate_up_proj", None), "bias", None)]
    biases.append(getattr(owner, "gate_up_proj_bias", None))
    hidden, inner = down.shape[-2:]
    rows = gate_up.flatten(1, -2)  # (E, 2 I, H)
    has_bias = any(bias is not None for bias in biases)
    if has_bias or rows.shape[1:] != (2 * inner, hidden):
        raise LayerError(
            f"{name}: experts must be SwiGLU matrices without biases, got {type(module).__name__};"
            f" name them as an exception, such as '*.{name.rpartition('.')[2]}'"
        )
    for pair, matrix in zip(rows, down, strict=True):
        matrices = (pair[:inner], pair[inner:], matrix)
        yield Expert(dict(zip(MATRICES, matrices, strict=True)), _gate(owner))


def _gate(owner: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the gating function of (gate, up)."""
    if hasattr(owner, "act_fn"):
        activation = owner.act_fn
        return lambda gate, up: activation(gate) * up
    gating: Callable[[Tensor, Tensor], Tensor] = owner.gate
    return gating
