"""Parallel plan of a model: the supported ways to split it, stored separately from the model."""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Literal, get_args

from attrs import field, frozen
from torch import nn

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.settings import nearest

Style = Literal[
    "column",
    "column_to_whole",
    "expert",
    "expert_column",
    "expert_row",
    "gathering_column",
    "heads",
    "replicated",
    "router",
    "row",
    "row_of_whole",
    "sequence",
    "split_heads",
    "split_width",
    "summed",
    "vocabulary",
]
"""Tensor-parallel style of a module's parameters:

- `column`: splits the rows (dim 0) of the weight and the bias; full input, split output.
- `gathering_column`: like `column`, for an input that is split along the sequence and gathered.
- `row`: splits the columns (dim 1) of the weight, not the bias; split input, all-reduced output.
- `vocabulary`: splits the rows of an embedding or of the head.
- `sequence`: replicated; applied to hidden states that are split along the sequence.
- `heads`: replicated; applied to tensors (B, S, heads, D) whose heads are split.
- `split_heads`: splits dim 0, which counts heads.
- `split_width`: weight of a `FullWidthNorm`, split along with the normalized width.
- `router`: replicated; routes this rank's slice of the sequence and gathers all choices.
- `expert_column`: splits the rows of expert weights (experts, matrices, rows, columns) and of
  biases (experts, matrices, rows).
- `expert_row`: splits the columns of expert weights (experts, rows, columns), not the bias.
- `expert`: replicated; one part per expert (dim 0), applied like its neighbor `expert_column` or
  `expert_row`, so each rank has a partial sum of its gradient. For adapters.
- `column_to_whole`: like `column`, with the output gathered on each rank.
- `row_of_whole`: like `row`, for an input that is replicated on each rank.
- `replicated`: replicated; applied to full hidden states, so each rank has the full gradient.
- `summed`: module whose parameters are split by patterns of their full names; full input,
  all-reduced output.
"""


@frozen(kw_only=True)
class ModelPlan:
    """Parallel plan: tensor-parallel styles, blocks, pipeline cuts and tied weights.

    In patterns `*` matches one part of a dotted name.
    """

    tensor: Mapping[str, Style] = field(factory=dict)
    """Styles by module pattern. Must cover every module that owns parameters; empty if the model
    does not support tensor parallelism."""
    blocks: str = ""
    """Pattern of the blocks, the units of activation checkpointing and sharding; by default the
    entire model is one unit."""
    cuts: tuple[int, ...] = (0,)
    """Layer indices at which a pipeline stage may start, ascending from 0."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs (owner, copy) of parameter names that share one weight."""
    repeated: tuple[tuple[str, str], ...] = ()
    """Pairs (parameter, name) of duplicate tensors, optional in a checkpoint folder."""
    embedding: tuple[str, ...] = ()
    """Patterns of the modules before the blocks, on the first stage; needed to split a module of
    your own into pipeline stages."""
    head: tuple[str, ...] = ()
    """Patterns of the modules after the blocks, on the last stage."""
    split_sequence: bool = True
    """Sequence parallelism: between blocks each tensor rank has a slice of the sequence."""

    def style(self, parameter: str) -> Style:
        """Return the style of a parameter with this full name.

        Raises:
            ModelError: no pattern matches.
        """
        # A pattern for the parameter itself takes precedence over one for its module.
        for name in (parameter, parameter.rpartition(".")[0]):
            for pattern, style in self.tensor.items():
                if _matches(pattern, name):
                    return style
        raise ModelError(f"the model's plan does not cover parameter {parameter!r}; add a pattern")

    def split_dim(self, parameter: str) -> int | None:
        """Return the dim of a parameter that tensor parallelism splits; None if replicated."""
        match self.style(parameter):
            case "column" | "column_to_whole" | "gathering_column":
                return 0
            case "vocabulary" | "split_heads" | "split_width":
                return 0
            case "row" | "row_of_whole":
                # The bias is added once, after the sum over ranks.
                return None if parameter.endswith(".bias") else 1
            case "expert_column":
                return 2  # (experts, matrices, rows, columns)
            case "expert_row":
                return None if parameter.endswith(".bias") else 2  # (experts, rows, columns)
            case _:
                return None

    def is_block(self, module: str) -> bool:
        """Whether the module with this full name is a block."""
        return bool(self.blocks) and _matches(self.blocks, module)

    def names(self, patterns: tuple[str, ...], module: str) -> bool:
        """Whether any of `patterns` matches the module with this full name."""
        return any(_matches(pattern, module) for pattern in patterns if pattern)

    def holds(self, patterns: tuple[str, ...], name: str) -> bool:
        """Whether a module or parameter, or a module that contains it, matches `patterns`."""
        parts = name.split(".")
        prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(_matches(pattern, p) for pattern in patterns if pattern for p in prefixes)

    def check_names(self, module: nn.Module) -> None:
        """Check that all names and patterns match something in a module.

        Raises:
            ConfigError: one does not match, or a style is unknown; names the nearest match.
        """
        class_name = type(module).__name__
        for pattern, style in self.tensor.items():
            if style not in get_args(Style):
                raise ConfigError(
                    f"the plan of {class_name} has an unknown style {style!r} for {pattern!r};"
                    f" {nearest(str(style), get_args(Style))}"
                )
        modules = {name for name, _ in module.named_modules() if name}
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        owners = {name.rpartition(".")[0] or name for name in parameters}
        for patterns, names, fits in (
            (self.tensor, owners | parameters, owners),
            (filter(None, (self.blocks, *self.embedding, *self.head)), modules, modules),
            (chain.from_iterable(self.tied), parameters, parameters),
        ):
            for pattern in patterns:
                if not any(_matches(pattern, name) for name in names):
                    raise ConfigError(
                        f"the plan of {class_name} names {pattern!r}, which matches no parameter;"
                        f" {nearest(pattern, {_NUMBER.sub('*', name) for name in fits})}"
                    )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Numeric part of a dotted name."""


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None
