"""Muon (Jordan et al., 2024): orthogonalized momentum for each hidden matrix.

A sharded matrix is gathered on one owning process, orthogonalized there once, and sent back in
parts. Both transfers use bfloat16, the precision of the iteration, so the result is the same under
every layout. Embeddings, heads, norms, biases and routers are updated by AdamW.
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

from ms_parallel.engine.optimizer import LEAST, OptimizerConfig, ParameterGroup, betas, kind_of
from ms_parallel.engine.optimizers.adamw import adamw_rules
from ms_parallel.engine.rules.rule import Held, Moments, Rule
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.weight_names import Box, slices_of
from ms_parallel.settings import flag, integer, number, one_of, short_repr
from ms_parallel.split.owners import OwnerExchange
from ms_parallel.split.part import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic polynomial with the steepest slope at 0 whose iterates stay near 1."""
ADAMW = ("*.gate.weight", "*.router.weight", "*.shared_expert_gate.weight")
"""Matrices in blocks that route tokens rather than transform them."""

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
        raise ConfigError(f"adamw is {short_repr(value)}; give a list of patterns of names")
    return tuple(value)


def _fused(instance: object, attribute: Any, value: Any) -> None:
    rows = value.values() if isinstance(value, Mapping) else [None]
    for row_counts in rows:
        counts = row_counts if isinstance(row_counts, list | tuple) else [0]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts):
            raise ConfigError(
                f"{attribute.name} is {short_repr(value)}; give the rows of each matrix for a"
                " pattern of names, such as {'*.qkv_proj.weight' = [64, 32, 32]}"
            )


@frozen(kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of blocks, AdamW for all else.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    momentum: float = field(default=0.95, validator=number(below=1.0))
    """Decay of the mean of gradients."""
    nesterov: bool = field(default=True, validator=flag)
    """Look one step ahead along the momentum."""
    iterations: int = field(default=5, validator=integer(maximum=99))
    """Steps of the Newton-Schulz iteration."""
    scale: Literal["match_rms_adamw", "original"] = field(
        default="match_rms_adamw", validator=one_of("match_rms_adamw", "original")
    )
    """Scale of an update: 0.2·sqrt(max(rows, columns)), as great as AdamW's at the same rate (Liu
    et al., 2025); or sqrt(max(1, rows/columns)), which needs a rate of its own, such as 0.02."""
    adamw: tuple[str, ...] = field(default=ADAMW, converter=_patterns)
    """Patterns of names of matrices in blocks that AdamW updates too; `*` stands for anything."""
    adamw_learning_rate: float | None = field(default=None, validator=number(optional=True))
    """AdamW's highest rate; None for the same."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=betas)
    """AdamW's decay of the first and second moment."""
    eps: float = field(default=1e-8, validator=number(minimum=LEAST))
    """Added to the root of AdamW's second moment."""
    fused: Mapping[str, Sequence[int]] = field(factory=dict, validator=_fused)
    """Rows of each of the matrices that lie one below the other in a weight, by pattern of names;
    for modules that are not described elsewhere. Experts are always taken one by one."""

    def rules(self, held: Held) -> list[Rule]:
        """Build Muon rules for the hidden matrices and AdamW rules for all other parameters."""
        hidden = {name for name in held.parameters if self._is_hidden(name, held)}
        if not held.plan.blocks:
            raise ConfigError(
                "Muon is for the matrices of hidden layers, and this module has no plan that names"
                " them; give plan=ModelPlan(blocks=...), such as blocks='layers.*'"
            )
        rules: list[Rule] = [MuonRule(held, share) for share in self.shares(held, sorted(hidden))]
        adamw_names = [name for name in held.parameters if name not in hidden]
        adamw_rate = (
            self.learning_rate if self.adamw_learning_rate is None else self.adamw_learning_rate
        )
        ratio = adamw_rate / self.learning_rate if self.learning_rate else 1.0
        return rules + adamw_rules(evolve(self, learning_rate=adamw_rate), held, adamw_names, ratio)

    def _is_hidden(self, name: str, held: Held) -> bool:
        """Return whether Muon updates this parameter: one or several matrices of a block."""
        if name.endswith("bias") or not held.plan.holds((held.plan.blocks,), name):
            return False
        if any(fnmatchcase(name, pattern) for pattern in self.adamw):
            return False
        try:
            style = held.plan.style(name) if held.plan.tensor else ""
        except ModelError:  # adapters are not in the plan
            style = ""
        if style in ("router", "split_heads"):
            return False
        dims = held.parameters[name].dim()
        return dims == 2 or (dims > 2 and "expert" in name)


class MuonRule:
    """Muon on local shards, with a momentum buffer of the same shape.

    Args:
        held: all local parameters.
        share: parameter group to update.
    """

    whole: Moments = {}  # noqa: RUF012 - always empty

    def __init__(self, held: Held, share: ParameterGroup) -> None:
        self.share = share
        self.parameters = {name: held.parameters[name] for name in share.names}
        self.momentum = {
            name: torch.zeros_like(local_part(parameter))
            for name, parameter in self.parameters.items()
        }
        boxes = {
            (name, number): box
            for name, parameter in self.parameters.items()
            for number, box in enumerate(matrices(name, parameter.shape, held, share.config.fused))
        }
        sizes = {key: tuple(s.stop - s.start for s in box[-2:]) for key, box in boxes.items()}
        costs = {key: float(r * c * min(r, c)) for key, (r, c) in sizes.items()}
        self.exchange = OwnerExchange(self.parameters, boxes, costs, held.groups)
        self.factors = {key: self._factor(*size) for key, size in sizes.items()}

    @property
    def moments(self) -> Moments:
        """Momentum buffers."""
        return {"momentum": self.momentum}

    def apply(self, gradients: Mapping[str, Tensor], rate: float, taken: int) -> None:
        """Update the parameters in place."""
        config = self.share.config
        ahead = {}
        for name, buffer in self.momentum.items():
            gradient = gradients[name]
            buffer.lerp_(gradient, 1.0 - config.momentum)
            update = gradient.lerp(buffer, config.momentum) if config.nesterov else buffer
            ahead[name] = update.bfloat16()
        matrices_by_key = self.exchange.gather(ahead)
        updates = {
            key: orthogonal(matrix.view(matrix.shape[-2:]), config.iterations).view(matrix.shape)
            for key, matrix in matrices_by_key.items()
        }
        rate *= self.share.rate
        decay_factor = 1.0 - rate * self.share.weight_decay
        local = {
            name: local_part(param).mul_(decay_factor) for name, param in self.parameters.items()
        }
        for piece, values in self.exchange.scatter(updates, torch.bfloat16):
            part = local[piece.key[0]][piece.of_part]
            part.add_(values, alpha=-rate * self.factors[piece.key])

    def _factor(self, rows: int, columns: int) -> float:
        if self.share.config.scale == "original":
            return sqrt(max(1.0, rows / columns))
        return 0.2 * sqrt(max(rows, columns))


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Approximate U·Vᵀ of a matrix U·S·Vᵀ by the iteration X ← aX + (bA + cA²)X with A = XXᵀ.

    Args:
        matrix: (rows, columns) in bfloat16; normalized first, for convergence.
        iterations: number of iterations.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix  # the Gram matrix is the smaller one
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def matrices(
    name: str, shape: Sequence[int], held: Held, fused: Mapping[str, Sequence[int]]
) -> Iterator[Box]:
    """Yield the boxes of the matrices that a parameter contains.

    Raises:
        ConfigError: the rows in `fused` do not fit the parameter, or are missing.
    """
    rows = _rows_of(name, shape, fused)
    for piece in slices_of(held.weights(), name, shape):
        *outer, down, across = piece.box
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
            f"{name} seems to hold several matrices, and Muon has to know which; give the rows of"
            f" each in fused, such as {{'*.{name.split('.')[-2]}.weight' = [{shape[0]}]}} if it is"
            " one"
        )
    if rows is not None and sum(rows) != shape[-2]:
        raise ConfigError(
            f"fused gives {name} {sum(rows)} rows, and it has {shape[-2]}; give those of each of"
            " its matrices"
        )
    return rows


KINDS = {"Muon": kind_of(MuonConfig)}
