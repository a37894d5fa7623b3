"""Converts transformers' parallel plans to `ModelPlan`."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from ms_parallel import operators
from ms_parallel.entry import one_line
from ms_parallel.errors import ModelError
from ms_parallel.models.huggingface.attention import registered
from ms_parallel.models.huggingface.config import TransformersModel, transformers
from ms_parallel.models.huggingface.experts import count_routers, pair_expert_matrices
from ms_parallel.models.plan import ModelPlan, Style
from ms_parallel.operators.protocol import Ops

Named = Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
Shapes = dict[str, torch.Size]

STYLES: dict[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "replicated",  # left unsplit, like parameters outside the plan
    "colwise_gather_output": "column_to_whole",
    "rowwise_split_input": "row_of_whole",
    "packed_colwise": "expert_column",
    "replicated_with_grad_allreduce": "heads",
    "moe_tp_experts": "summed",
}
"""Our tensor-parallel style for each of transformers' styles."""
UNNAMED = "unnamed"
"""Style of a parameter missing from transformers' plan whose sibling layers are split."""
ON_SPLIT_FEATURES = frozenset({"act", "act_fn", "q_norm", "k_norm"})
"""Child modules that run between a column-parallel and a row-parallel layer of their parent."""
EXPERTS_DIMS = 3
"""Number of dims of a weight that stacks one matrix per expert."""


def build_on_meta(config: TransformersModel, ops: Ops | None = None) -> Any:
    """Build the full model on the meta device, with attention computed by `ops`.

    Raises:
        ModelError: transformers cannot build it, or cannot use our attention.
    """
    name = registered(cast(Hashable, ops or operators))
    # A copy, because the next line changes it.
    settings = type(config.settings).from_dict(config.settings.to_dict())
    settings.output_router_logits = False  # `CountedRouter` adds the balance loss instead
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
                f"{config.model_type} does not use transformers' attention interface, so attention"
                " would cross packed documents; train this model with transformers"
            ) from error
        reason = one_line(str(error))[:200]
        raise ModelError(
            f"transformers cannot build this {config.model_type} ({reason})"
        ) from error
    pair_expert_matrices(model, getattr(model.base_model.config, "base_model_tp_plan", None))
    if config.mixture is not None:
        count_routers(model)
    return model.eval()


@lru_cache(maxsize=4)
def meta_model(config: TransformersModel) -> Any:
    """Return the full model on the meta device; cached and shared, so do not modify it."""
    return build_on_meta(config)


@lru_cache(maxsize=16)
def shapes_of(config: TransformersModel, named: Named = nn.Module.named_parameters) -> Shapes:
    """Shapes by name of all tensors that `named` yields for the full model; tied ones once."""
    return {name: tensor.shape for name, tensor in named(meta_model(config))}


@lru_cache(maxsize=16)
def plan_of(config: TransformersModel) -> ModelPlan:
    """Build a model's parallel plan from transformers' tensor and pipeline plans."""
    model = meta_model(config)
    prefix = model.base_model_prefix
    embedding, blocks, head = _stage_parts(model, prefix)
    tied = model.get_expanded_tied_weights_keys() if config.tie_word_embeddings else {}
    return ModelPlan(
        tensor=_tensor_styles(model, prefix),
        blocks=f"{blocks}.*",
        cuts=tuple(range(config.num_hidden_layers)) if embedding else (0,),
        tied=tuple((owner, copy) for copy, owner in sorted(tied.items())),
        embedding=embedding,
        head=head,
        split_sequence=False,
    )


def _stage_parts(model: Any, prefix: str) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the names of the modules before the blocks, the block list, and the modules after it.

    Without a pipeline plan from transformers only the block list is known.

    Raises:
        ModelError: the model does not have exactly one list with its number of layers.
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
    index = published.index(blocks_name)  # the plan lists modules in execution order
    before_blocks = tuple(f"{prefix}.{name}" for name in published[:index])
    after_blocks = tuple(f"{prefix}.{name}" for name in published[index + 1 :])
    heads = [name for name, _ in model.named_children() if name != prefix]
    return before_blocks, lists[0], (*after_blocks, *heads)


def _tensor_styles(model: Any, prefix: str) -> dict[str, Style]:
    """Styles by module or parameter pattern; empty if transformers has no tensor plan."""
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
            # Replicated, but applied to split features: gradients are summed over ranks.
            styles[module] = "heads"
        elif parent in split or module_path in split:
            # Unknown whether each rank's gradient is partial or complete.
            styles[parameter] = cast(Style, UNNAMED)
        else:
            styles[module] = "replicated"
    return styles


def _split_parents(model: Any, published: Mapping[str, str], prefix: str) -> set[str]:
    """Return modules with both a column-parallel and a row-parallel child.

    Only children that exist count: an expert layer has the same name and plan as a dense one, but
    its router has no split siblings.
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
