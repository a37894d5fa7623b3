"""How a model may be split, as a value beside the model."""

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
"""What the tensor axis does to the parameters of one module:

- `column`: the weight's rows (dim 0) and the bias are split; full input, split output.
- `gathering_column`: likewise, of an input that is split along the sequence and gathered here.
- `row`: the weight's columns (dim 1) are split, the bias is whole; split input, summed output.
- `vocabulary`: the rows of an embedding or of the head are split.
- `sequence`: whole; works on hidden states that are split along the sequence.
- `heads`: whole; works on tensors (B, S, heads, D) whose heads are split.
- `split_heads`: dim 0 counts heads and is split.
- `split_width`: the weight of a `WholeWidthNorm`, split with the width that it norms.
- `router`: whole; chooses for a part of the sequence, and shows all of it what was chosen.
- `expert_column`: a matrix for each expert in (experts, several, rows, columns), whose rows are
  split, and the bias (experts, several, rows) with them.
- `expert_row`: a matrix for each expert in (experts, rows, columns), whose columns are split; the
  bias is whole.
- `column_to_whole`: as `column`, and the output is put together on each rank.
- `row_of_whole`: as `row`, of an input that is whole on each rank.
- `replicated`: whole; works on whole hidden states, so each rank has the whole gradient.
- `summed`: of a module whose own parameters are split, each by a pattern of its full name; it takes
  whole inputs, and its output is summed.
"""


@frozen(kw_only=True)
class ModelPlan:
    """Which modules split how, what is one block, where stages may be cut, what is tied.

    In patterns `*` stands for one part of a dotted name.
    """

    tensor: Mapping[str, Style] = field(factory=dict)
    """Module pattern to style; covers every module that owns parameters, or none of them: then the
    tensor axis cannot split the model."""
    blocks: str = ""
    """Pattern of the units of recomputation and of sharding; by default the whole is the unit."""
    cuts: tuple[int, ...] = (0,)
    """Layer numbers at which a stage may begin, ascending, 0 first."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs (owner, copy) of parameter names that hold one weight."""
    repeated: tuple[tuple[str, str], ...] = ()
    """Pairs (parameter, name) of tensors that a folder holds once more; it may leave them out."""
    embedding: tuple[str, ...] = ()
    """Patterns of the modules before the blocks, which the first stage has; needed to cut a module
    of your own into stages."""
    head: tuple[str, ...] = ()
    """Patterns of the modules behind the blocks, which the last stage has."""
    split_sequence: bool = True
    """Between blocks each tensor rank holds its part of the sequence; else all of it."""

    def style(self, parameter: str) -> Style:
        """Find the style of a parameter by its full name.

        Raises:
            ModelError: no pattern matches.
        """
        for name in (parameter, parameter.rpartition(".")[0]):
            for pattern, style in self.tensor.items():
                if _matches(pattern, name):
                    return style
        raise ModelError(f"the model's plan does not cover parameter {parameter!r}; add a pattern")

    def split_dim(self, parameter: str) -> int | None:
        """Find the dim of a parameter that the tensor axis splits, None where it is whole."""
        match self.style(parameter):
            case "column" | "column_to_whole" | "gathering_column":
                return 0
            case "vocabulary" | "split_heads" | "split_width":
                return 0
            case "row" | "row_of_whole":
                return None if parameter.endswith(".bias") else 1
            case "expert_column":
                return 2
            case "expert_row":
                return None if parameter.endswith(".bias") else 2
            case _:
                return None

    def is_block(self, module: str) -> bool:
        """Return whether a module of this full name is one block."""
        return bool(self.blocks) and _matches(self.blocks, module)

    def names(self, patterns: tuple[str, ...], module: str) -> bool:
        """Return whether one of `patterns` names the module of this full name."""
        return any(_matches(pattern, module) for pattern in patterns if pattern)

    def holds(self, patterns: tuple[str, ...], name: str) -> bool:
        """Return whether a module or parameter is, or is in, one that `patterns` name."""
        parts = name.split(".")
        heads = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(_matches(pattern, head) for pattern in patterns if pattern for head in heads)

    def check_names(self, module: nn.Module) -> None:
        """Check that each name and pattern is of something that a module has.

        Raises:
            ConfigError: one is not, or a style is unknown; names it and the nearest that fits.
        """
        kind = type(module).__name__
        for pattern, style in self.tensor.items():
            if style not in get_args(Style):
                raise ConfigError(
                    f"the plan of {kind} gives {pattern!r} the style {style!r};"
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
                        f"the plan of {kind} names {pattern!r}, where it has no parameter;"
                        f" {nearest(pattern, {_NUMBER.sub('*', name) for name in fits})}"
                    )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a dotted name that counts modules."""


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None
