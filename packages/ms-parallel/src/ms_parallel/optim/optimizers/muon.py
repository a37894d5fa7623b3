"""Muon (Jordan et al., 2024): orthogonalized momentum for each hidden matrix.

A sharded matrix is gathered on one owning process, orthogonalized there, and scattered back. Both
transfers use bfloat16, the precision of the iteration, so the result is the same under every
layout. AdamW updates embeddings, output heads, norms, biases and routers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, product
from math import sqrt
from typing import Any, Literal

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.weight_names import Box, slices_of
from ms_parallel.optim.optimizer import (
    MIN_DIVISOR,
    OptimizerConfig,
    ParameterGroup,
    betas,
    kind_of,
)
from ms_parallel.optim.optimizers.adamw import adamw_rules
from ms_parallel.optim.rule import LocalParameters, Moments, UpdateRule
from ms_parallel.settings import flag, integer, number, one_of, short_repr
from ms_parallel.split.owners import OwnerExchange
from ms_parallel.split.part import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, tuned for a steep slope at 0 with iterates near 1."""
ADAMW = ("*.gate.weight", "*.router.weight", "*.shared_expert_gate.weight")
"""Name patterns of matrices that route tokens instead of transforming them."""

HALVES = re.compile(r"gate_up_proj\.weight$")
"""Stacked gate and up projections, two matrices of equal height."""
FUSED = re.compile(
    r"(qkv\w*|query_key_value|c_attn|in_proj\w*)\.weight$|in_proj_weight$", re.IGNORECASE
)
"""Names that models give to projections of several stacked matrices."""


def _patterns(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(
        isinstance(pattern, str) for pattern in value
    ):
        raise ConfigError(f"adamw must be a list of name patterns, got {short_repr(value)}")
    return tuple(value)


def _fused(instance: object, attribute: Any, value: Any) -> None:
    rows = value.values() if isinstance(value, Mapping) else [None]
    for row_counts in rows:
        counts = row_counts if isinstance(row_counts, list | tuple) else [0]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts):
            raise ConfigError(
                f"{attribute.name} must map name patterns to the rows of each matrix, such as"
                f" {{'*.qkv_proj.weight' = [64, 32, 32]}}, got {short_repr(value)}"
            )


@frozen(kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of blocks, AdamW for all other parameters.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    momentum: float = field(default=0.95, validator=number(below=1.0))
    """Decay of the gradient's exponential moving average."""
    nesterov: bool = field(default=True, validator=flag)
    """Use Nesterov momentum."""
    iterations: int = field(default=5, validator=integer(maximum=99))
    """Number of Newton-Schulz iterations."""
    scale: Literal["match_rms_adamw", "original"] = field(
        default="match_rms_adamw", validator=one_of("match_rms_adamw", "original")
    )
    """Scale of an update: 0.2·sqrt(max(rows, columns)), which matches the RMS of AdamW updates (Liu
    et al., 2025); or sqrt(max(1, rows/columns)), which needs a higher rate such as 0.02."""
    adamw: tuple[str, ...] = field(default=ADAMW, converter=_patterns)
    """Name patterns of block matrices that AdamW updates instead; `*` matches anything."""
    adamw_learning_rate: float | None = field(default=None, validator=number(optional=True))
    """Peak learning rate of AdamW; None for `learning_rate`."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=betas)
    """AdamW's decay of the first and second moment."""
    eps: float = field(default=1e-8, validator=number(minimum=MIN_DIVISOR))
    """Term added to the root of AdamW's second moment."""
    fused: Mapping[str, Sequence[int]] = field(factory=dict, validator=_fused)
    """Row counts of the matrices stacked in a fused weight, by name pattern; needed for your own
    modules. Expert matrices are always orthogonalized separately."""

    def rules(self, params: LocalParameters) -> list[UpdateRule]:
        """Build Muon rules for the hidden matrices and AdamW rules for all other parameters."""
        hidden = {name for name in params.parameters if self._is_hidden(name, params)}
        if not params.plan.blocks:
            raise ConfigError(
                "Muon updates the matrices of blocks, so it needs a plan that names them; pass"
                " plan=ModelPlan(blocks='layers.*')"
            )
        rules: list[UpdateRule] = [
            MuonRule(params, group) for group in self.parameter_groups(params, sorted(hidden))
        ]
        adamw_names = [name for name in params.parameters if name not in hidden]
        adamw_rate = (
            self.learning_rate if self.adamw_learning_rate is None else self.adamw_learning_rate
        )
        # The engine passes one scheduled rate per step, so AdamW's rate is a factor on it.
        ratio = adamw_rate / self.learning_rate if self.learning_rate else 1.0
        return rules + adamw_rules(
            evolve(self, learning_rate=adamw_rate), params, adamw_names, ratio
        )

    def _is_hidden(self, name: str, params: LocalParameters) -> bool:
        """Whether Muon updates this parameter: one or several matrices of a block."""
        if name.endswith("bias") or not params.plan.holds((params.plan.blocks,), name):
            return False
        if any(fnmatchcase(name, pattern) for pattern in self.adamw):
            return False
        try:
            style = params.plan.style(name) if params.plan.tensor else ""
        except ModelError:  # adapters are not in the plan
            style = ""
        if style in ("router", "split_heads"):
            return False
        dims = params.parameters[name].dim()
        return dims == 2 or (dims > 2 and "expert" in name)


class MuonRule:
    """Muon on local shards, with a momentum buffer of the same shape.

    Args:
        params: all local parameters.
        group: parameter group to update.
    """

    unsharded: Moments = {}  # noqa: RUF012 - always empty

    def __init__(self, params: LocalParameters, group: ParameterGroup) -> None:
        self.group = group
        self.parameters = {name: params.parameters[name] for name in group.names}
        self.momentum = {
            name: torch.zeros_like(local_part(parameter))
            for name, parameter in self.parameters.items()
        }
        boxes = {
            (name, number): box
            for name, parameter in self.parameters.items()
            for number, box in enumerate(
                matrices(name, parameter.shape, params, group.config.fused)
            )
        }
        sizes = {key: tuple(s.stop - s.start for s in box[-2:]) for key, box in boxes.items()}
        # FLOPs of an iteration, up to a factor, to balance matrices over owning processes.
        costs = {key: float(r * c * min(r, c)) for key, (r, c) in sizes.items()}
        self.exchange = OwnerExchange(self.parameters, boxes, costs, params.groups)
        self.factors = {key: self._factor(*size) for key, size in sizes.items()}

    @property
    def moments(self) -> Moments:
        """Momentum buffers."""
        return {"momentum": self.momentum}

    def apply(self, gradients: Mapping[str, Tensor], rate: float, update_count: int) -> None:
        """Update the parameters in place."""
        config = self.group.config
        ahead = {}
        for name, buffer in self.momentum.items():
            gradient = gradients[name]
            # m ← μ·m + (1-μ)·g, then with Nesterov u = (1-μ)·g + μ·m.
            buffer.lerp_(gradient, 1.0 - config.momentum)
            update = gradient.lerp(buffer, config.momentum) if config.nesterov else buffer
            # The iteration runs in bfloat16 anyway, so this halves the messages without losing
            # bits.
            ahead[name] = update.bfloat16()
        matrices_by_key = self.exchange.gather(ahead)
        # Matrices that this process owns; leading box dims, such as the expert, have size 1.
        updates = {
            key: orthogonal(matrix.view(matrix.shape[-2:]), config.iterations).view(matrix.shape)
            for key, matrix in matrices_by_key.items()
        }
        rate *= self.group.rate
        decay_factor = 1.0 - rate * self.group.weight_decay
        # Decoupled weight decay, applied before the update as in AdamW.
        local = {
            name: local_part(param).mul_(decay_factor) for name, param in self.parameters.items()
        }
        # Pieces of the updates that overlap this process's shards.
        for piece, values in self.exchange.scatter(updates, torch.bfloat16):
            part = local[piece.key[0]][piece.of_part]
            part.add_(values, alpha=-rate * self.factors[piece.key])

    def _factor(self, rows: int, columns: int) -> float:
        if self.group.config.scale == "original":
            return sqrt(max(1.0, rows / columns))
        return 0.2 * sqrt(max(rows, columns))


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Approximate U·Vᵀ for a matrix U·S·Vᵀ by iterating X ← aX + (bA + cA²)X with A = XXᵀ.

    Args:
        matrix: (rows, columns) in bfloat16; normalized first, for convergence.
        iterations: number of iterations.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix  # the Gram matrix is the smaller one
    # Frobenius norm 1 bounds every singular value by 1, where the iteration converges.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT  # A = X·Xᵀ, (rows, rows)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def matrices(
    name: str, shape: Sequence[int], params: LocalParameters, fused: Mapping[str, Sequence[int]]
) -> Iterator[Box]:
    """Yield the boxes of the matrices that a parameter contains.

    Raises:
        ConfigError: the rows in `fused` do not fit the parameter, or are missing.
    """
    rows = _rows_of(name, shape, fused)
    for piece in slices_of(params.weights(), name, shape):
        # Leading dims, such as experts or (gate, up), index separate matrices.
        *outer, down, across = piece.box
        # Row boundaries of the matrices stacked in one fused weight.
        ends = list(accumulate(rows)) if rows else [down.stop]
        starts = [0, *ends[:-1]] if rows else [down.start]
        for index in product(*(range(dim_slice.start, dim_slice.stop) for dim_slice in outer)):
            for start, end in zip(starts, ends, strict=True):
                yield (*(slice(i, i + 1) for i in index), slice(start, end), across)


def _rows_of(
    name: str, shape: Sequence[int], fused: Mapping[str, Sequence[int]]
) -> tuple[int, ...] | None:
    """Return the heights of the stacked matrices in a weight; None if its slices define them."""
    rows = next((tuple(n) for pattern, n in fused.items() if fnmatchcase(name, pattern)), None)
    if rows is None and len(shape) == 2 and HALVES.search(name) and shape[0] % 2 == 0:
        return (shape[0] // 2,) * 2
    if rows is None and len(shape) == 2 and FUSED.search(name):
        raise ConfigError(
            f"{name} seems to be a fused weight, and Muon needs the row count of each matrix; set"
            f" fused, for example {{'*.{name.split('.')[-2]}.weight' = [{shape[0]}]}} if it is a"
            " single matrix"
        )
    if rows is not None and sum(rows) != shape[-2]:
        raise ConfigError(
            f"the row counts of {name} in fused must sum to {shape[-2]}, got {sum(rows)}"
        )
    return rows


KINDS = {"Muon": kind_of(MuonConfig)}
