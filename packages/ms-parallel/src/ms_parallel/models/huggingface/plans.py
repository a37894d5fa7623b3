"""Converts the plans that transformers publishes for a model to ours."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ms_parallel import operators
from ms_parallel.errors import ModelError
from ms_parallel.models.huggingface.attention import registered
from ms_parallel.models.huggingface.config import TransformersModel, transformers
from ms_parallel.models.huggingface.experts import count_routers, unpack
from ms_parallel.models.plan import ModelPlan, Style
from ms_parallel.operators.protocol import Ops

Named = Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
Shapes = dict[str, torch.Size]

STYLES: dict[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "replicated",  # not split, like parameters that a plan does not name
    "colwise_gather_output": "column_to_whole",
    "rowwise_split_input": "row_of_whole",
    "packed_colwise": "expert_column",
    "replicated_with_grad_allreduce": "heads",
    "moe_tp_experts": "summed",
}
"""Our style for each of transformers' styles."""
UNNAMED = "unnamed"
"""Style of a parameter that is not in the published plan but next to layers that it splits."""
ON_SPLIT_FEATURES = frozenset({"act", "act_fn", "q_norm", "k_norm"})
"""Modules that run between a column-parallel and a row-parallel layer of the same parent."""
EXPERTS_DIMS = 3
"""Dims of a weight that stacks a matrix for each expert."""


def built(config: TransformersModel, ops: Ops | None = None) -> Any:
    """Build the whole model without storage, with attention by these operators.

    Raises:
        ModelError: transformers cannot build it, or cannot use our attention.
    """
    name = registered(cast(Hashable, ops or operators))
    settings = type(config.settings).from_dict(config.settings.to_dict())
    settings.output_router_logits = False  # we add the balance loss, see `CountedRouter`
    dtype = torch.get_default_dtype()
    # The default, torch's grouped matrix product, does not support float64.
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    try:
        with torch.device("meta"):
            model = transformers().AutoModelForCausalLM.from_config(
                settings, attn_implementation=name, dtype=dtype, **options
            )
    except Exception as error:  # constructors raise many types for bad settings
        if isinstance(error, KeyError) and error.args == (name,):
            raise ModelError(
                f"{config.model_type} does not use transformers' attention interface, so packed"
                " documents cannot be kept apart; train this model with transformers"
            ) from error
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"transformers cannot build this {config.model_type} ({reason})"
        ) from error
    unpack(model, getattr(model.base_model.config, "base_model_tp_plan", None))
    if config.mixture is not None:
        count_routers(model)
    return model.eval()


@lru_cache(maxsize=4)
def described(config: TransformersModel) -> Any:
    """Build the whole model without storage; the result is shared and must not be changed."""
    return built(config)


@lru_cache(maxsize=16)
def shapes_of(config: TransformersModel, named: Named = nn.Module.named_parameters) -> Shapes:
    """Map names of what `named` yields for the whole model to shapes; tied tensors once."""
    return {name: tensor.shape for name, tensor in named(described(config))}


@lru_cache(maxsize=16)
def plan_of(config: TransformersModel) -> ModelPlan:
    """Build the plan of how a model may be split from what transformers publishes."""
    model = described(config)
    prefix = model.base_model_prefix
    embedding, blocks, head = _line(model, prefix)
    tied = model.get_expanded_tied_weights_keys() if config.tie_word_embeddings else {}
    return ModelPlan(
        tensor=_tensor(model, prefix),
        blocks=f"{blocks}.*",
        cuts=tuple(range(config.num_hidden_layers)) if embedding else (0,),
        tied=tuple((owner, copy) for copy, owner in sorted(tied.items())),
        embedding=embedding,
        head=head,
        split_sequence=False,
    )


def _line(model: Any, prefix: str) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the parts before the blocks, their list and the parts after; only the list if unknown.

    Raises:
        ModelError: no single list of blocks has the model's number of layers.
    """
    count = model.config.num_hidden_layers
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and not re.search(r"\.\d+\.", name)
    ]
    if len(lists) != 1:
        raise ModelError(
            f"{type(model).__name__} must have one list of its {count} layers, found {len(lists)};"
            " train this model with transformers"
        )
    published = list(getattr(model.base_model.config, "base_model_pp_plan", None) or {})
    blocks_name = lists[0].removeprefix(f"{prefix}.")
    if blocks_name not in published:
        return (), lists[0], ()
    index = published.index(blocks_name)
    before_blocks = tuple(f"{prefix}.{name}" for name in published[:index])
    after_blocks = tuple(f"{prefix}.{name}" for name in published[index + 1 :])
    heads = [name for name, _ in model.named_children() if name != prefix]
    return before_blocks, lists[0], (*after_blocks, *heads)


def _tensor(model: Any, prefix: str) -> dict[str, Style]:
    """Map patterns of modules or parameters to styles; empty if no plan is published."""
    published = getattr(model.base_model.config, "base_model_tp_plan", None)
    if not published:
        return {}
    styles: dict[str, Style] = {}
    split = _split_parents(model, published, prefix)
    for name, value in model.named_parameters():
        parameter = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        module = parameter.rpartition(".")[0]
        module_path = name.rpartition(".")[0]
        parent, _, child_name = module_path.rpartition(".")
        for pattern in (parameter, module):
            style = published.get(pattern.removeprefix(f"{prefix}."))
            if style is not None:
                stacked = style == "rowwise" and value.ndim == EXPERTS_DIMS
                styles[pattern] = "expert_row" if stacked else STYLES.get(style, style)
        if parameter in styles or module in styles:
            continue
        if parent in split and child_name in ON_SPLIT_FEATURES:
            styles[module] = (
                "heads"  # each rank has the gradient of its features; summed over ranks
            )
        elif parent in split or module_path in split:
            styles[parameter] = cast(
                Style, UNNAMED
            )  # unknown if the gradient is partial or complete
        else:
            styles[module] = "replicated"
    return styles


def _split_parents(model: Any, published: Mapping[str, str], prefix: str) -> set[str]:
    """Return modules with a child that splits its output and one that takes split input.

    Only existing children count: an expert layer shares its name and plan with dense layers, but
    its router is not next to any split layer.
    """
    styles: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        for path in (name, name.rpartition(".")[0]):
            pattern = re.sub(r"\.\d+(?=\.|$)", ".*", path).removeprefix(f"{prefix}.")
            if pattern in published:
                styles.setdefault(path.rpartition(".")[0], set()).add(published[pattern])
    return {
        parent
        for parent, parent_styles in styles.items()
        if {"colwise", "rowwise"} <= parent_styles
    }
