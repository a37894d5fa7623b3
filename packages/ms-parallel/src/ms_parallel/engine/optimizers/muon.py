"""Muon (Jordan et al., 2024): the momentum of each hidden matrix, orthogonalised.

On shards each whole matrix goes to one process that owns it, is orthogonalised there, and the
parts of the result go back, both ways in the bfloat16 that the iteration computes in. So it is
the same under every layout, and each is done once. Embeddings, heads, norms, biases and routers
are updated by AdamW.
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
from ms_parallel.settings import flag, number, one_of, shown, whole
from ms_parallel.split.owners import OwnerExchange
from ms_parallel.split.part import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Polynomial of degree five; chosen for the steepest slope at 0 that still stays near 1."""
ADAMW = ("*.gate.weight", "*.router.weight", "*.shared_expert_gate.weight")
"""Matrices in blocks that choose rather than compute."""

HALVES = re.compile(r"gate_up_proj\.weight$")
"""Two matrices of one height."""
FUSED = re.compile(
    r"(qkv\w*|query_key_value|c_attn|in_proj\w*)\.weight$|in_proj_weight$", re.IGNORECASE
)
"""What models name projections that are several matrices one below the other."""


def _patterns(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"adamw is {shown(value)}; give a list of patterns of names")
    return tuple(value)


def _fused(instance: object, attribute: Any, value: Any) -> None:
    rows = value.values() if isinstance(value, Mapping) else [None]
    for one in rows:
        counts = one if isinstance(one, list | tuple) else [0]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts):
            raise ConfigError(
                f"{attribute.name} is {shown(value)}; give the rows of each matrix for a pattern of"
                " names, such as {'*.qkv_proj.weight' = [64, 32, 32]}"
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
    iterations: int = field(default=5, validator=whole(most=99))
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
    epsilon: float = field(default=1e-8, validator=number(least=LEAST))
    """Added to the root of AdamW's second moment."""
    fused: Mapping[str, Sequence[int]] = field(factory=dict, validator=_fused)
    """Rows of each of the matrices that lie one below the other in a weight, by pattern of names;
    for modules that are not described elsewhere. Experts are always taken one by one."""

    def rules(self, held: Held) -> list[Rule]:
        """Make Muon's rule for each group of hidden matrices, and AdamW's for each of the rest."""
        hidden = {name for name in held.parameters if self._is_hidden(name, held)}
        if not held.plan.blocks:
            raise ConfigError(
                "Muon is for the matrices of hidden layers, and this module has no plan that names"
                " them; give plan=ModelPlan(blocks=...), such as blocks='layers.*'"
            )
        found: list[Rule] = [MuonRule(held, share) for share in self.shares(held, sorted(hidden))]
        rest = [name for name in held.parameters if name not in hidden]
        own = self.learning_rate if self.adamw_learning_rate is None else self.adamw_learning_rate
        ratio = own / self.learning_rate if self.learning_rate else 1.0
        return found + adamw_rules(evolve(self, learning_rate=own), held, rest, ratio)

    def _is_hidden(self, name: str, held: Held) -> bool:
        """Return whether a parameter is a matrix, or several, of a block, for Muon to update."""
        if name.endswith("bias") or not held.plan.holds((held.plan.blocks,), name):
            return False
        if any(fnmatchcase(name, pattern) for pattern in self.adamw):
            return False
        try:
            style = held.plan.style(name) if held.plan.tensor else ""
        except ModelError:  # an adapter, of which no plan knows
            style = ""
        if style in ("router", "split_heads"):
            return False
        dims = held.parameters[name].dim()
        return dims == 2 or (dims > 2 and "expert" in name)


class MuonRule:
    """Muon over the local parts of matrices, whose momentum lies beside them.

    Args:
        held: all parameters.
        share: those that are updated.
    """

    whole: Moments = {}  # noqa: RUF012 - there are none, and none is added

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
        """The mean of the gradient."""
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
        whole = self.exchange.gather(ahead)
        made = {
            key: orthogonal(matrix.view(matrix.shape[-2:]), config.iterations).view(matrix.shape)
            for key, matrix in whole.items()
        }
        rate *= self.share.rate
        kept = 1.0 - rate * self.share.weight_decay
        local = {name: local_part(each).mul_(kept) for name, each in self.parameters.items()}
        for piece, values in self.exchange.scatter(made, torch.bfloat16):
            part = local[piece.key[0]][piece.of_part]
            part.add_(values, alpha=-rate * self.factors[piece.key])

    def _factor(self, rows: int, columns: int) -> float:
        if self.share.config.scale == "original":
            return sqrt(max(1.0, rows / columns))
        return 0.2 * sqrt(max(rows, columns))


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Approximate U·Vᵀ of a matrix U·S·Vᵀ by the iteration X ← aX + (bA + cA²)X with A = XXᵀ.

    Args:
        matrix: (rows, columns) in bfloat16; divided by its norm, so that it converges.
        iterations: how often.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.mT if tall else matrix  # the Gram matrix is the smaller one
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = found @ found.mT
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if tall else found).contiguous()


def matrices(
    name: str, shape: Sequence[int], held: Held, fused: Mapping[str, Sequence[int]]
) -> Iterator[Box]:
    """Yield the matrices that a parameter holds, as boxes of it.

    Raises:
        ConfigError: the rows given in `fused` are not those of the parameter, or are needed.
    """
    rows = _rows_of(name, shape, fused)
    for piece in slices_of(held.weights(), name, shape):
        *outer, down, across = piece.box
        ends = list(accumulate(rows)) if rows else [down.stop]
        starts = [0, *ends[:-1]] if rows else [down.start]
        for index in product(*(range(one.start, one.stop) for one in outer)):
            for start, end in zip(starts, ends, strict=True):
                yield (*(slice(i, i + 1) for i in index), slice(start, end), across)


def _rows_of(
    name: str, shape: Sequence[int], fused: Mapping[str, Sequence[int]]
) -> tuple[int, ...] | None:
    """Return the rows of each matrix in a weight; None where it is one, or where its pieces say."""
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
