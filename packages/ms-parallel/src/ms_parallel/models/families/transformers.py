"""Family of models built by transformers, for architectures without a native family."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from ms_parallel import operators
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import LayoutError
from ms_parallel.models.config import TOKENS
from ms_parallel.models.family import ANY, Family
from ms_parallel.models.huggingface.config import TransformersModel
from ms_parallel.models.huggingface.plans import (
    STYLES,
    UNNAMED,
    Named,
    Shapes,
    build_on_meta,
    meta_model,
    plan_of,
    shapes_of,
)
from ms_parallel.models.huggingface.split_trial import check_tensor_split
from ms_parallel.models.huggingface.stage import TransformersStage
from ms_parallel.models.huggingface.trial import check_logits
from ms_parallel.models.huggingface.weights import rules_of
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops


def _build(
    config: TransformersModel,
    *,
    ops: Ops | None,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> TransformersStage:
    layers = layers or range(config.num_hidden_layers)
    ops = ops or operators
    check_logits(config)
    return TransformersStage(build_on_meta(config, ops), config, plan_of(config), layers, ops)


class _TransformersFamily(Family):
    """Family that reads and writes config.json unchanged."""

    def build(self, config: Any, *, ops: Ops | None, **part: Any) -> TransformersStage:
        """Build the model or one of its stages, with uninitialized weights."""
        return _build(config, ops=ops, **part)

    def shapes(self, config: Any, named: Named) -> Shapes:
        """Return the shapes of all tensors that `named` yields for the full model."""
        return shapes_of(config, named)

    def read(self, document: Mapping[str, Any]) -> Any:
        """Build the configuration from a decoded config.json."""
        return TransformersModel(document)

    def write(self, config: TransformersModel, dtype: torch.dtype) -> dict[str, object]:
        """Return the content of config.json for weights of `dtype`."""
        document = {key: value for key, value in config.document.items() if key != "torch_dtype"}
        if config.is_text_part:
            class_name = type(meta_model(config)).__name__
            document = json.loads(config.settings.to_json_string(use_diff=False))
            document |= {"architectures": [class_name], "model_type": config.settings.model_type}
        ids = {name: getattr(config, name) for name in TOKENS}
        ids = {name: value for name, value in ids.items() if value is not None}
        return {**document, **ids, "dtype": str(dtype).removeprefix("torch.")}

    def check_layout(self, config: TransformersModel, layout: Layout) -> None:
        """Check that transformers' parallel plans support a layout."""
        _check_layout(config, layout)
        self.check_context(layout)
        if layout.expert > 1:
            raise LayoutError(
                f"expert={layout.expert} is not supported for {config.model_type}, which is built"
                " by transformers; set expert=1 and shard the experts over data ranks"
            )


def _check_layout(config: TransformersModel, layout: Layout) -> None:
    plan, model_type = plan_of(config), config.model_type
    if layout.pipeline > 1 and not plan.embedding:
        raise LayoutError(
            f"pipeline={layout.pipeline} cannot cut {model_type}: transformers has no pipeline plan"
            " for it; set pipeline=1 and use data ranks instead"
        )
    if layout.pipeline > config.num_hidden_layers:
        raise LayoutError(
            f"pipeline={layout.pipeline} must not exceed the {config.num_hidden_layers} layers of"
            f" {model_type}; use 1 to {config.num_hidden_layers}"
        )
    if layout.pipeline > 1:
        check_logits(config, staged=True)
    if layout.tensor > 1:
        _check_tensor(config, plan, layout.tensor)
        check_tensor_split(config)


def _check_tensor(config: TransformersModel, plan: ModelPlan, tensor: int) -> None:
    model_type = config.model_type
    if set(plan.tensor.values()) <= {"replicated"}:
        raise LayoutError(
            f"tensor={tensor} cannot split {model_type}: transformers has no tensor plan for its"
            " blocks; set tensor=1 and use data ranks instead"
        )
    supported = {*STYLES.values(), "replicated", "expert_row"}
    for pattern, style in plan.tensor.items():
        if str(style) == UNNAMED:
            raise LayoutError(
                f"tensor={tensor} cannot split {model_type}: transformers' tensor plan omits"
                f" {pattern}, whose sibling layers it splits; set tensor=1"
            )
        if style not in supported:
            raise LayoutError(
                f"tensor={tensor} cannot split {model_type}: transformers splits {pattern} by"
                f" {style!r}, which is not supported; set tensor=1"
            )
    for name, shape in shapes_of(config).items():
        if plan.style(name) == "summed":
            raise LayoutError(
                f"tensor={tensor} cannot split {model_type}: transformers' tensor plan omits"
                f" {name!r}; set tensor=1"
            )
        dim = plan.split_dim(name)
        if dim is not None and shape[dim] % tensor:
            raise LayoutError(
                f"tensor={tensor} must divide dim {dim % len(shape)} of {name!r} in {model_type},"
                f" which has size {shape[dim]}"
            )
    sizes = config.shape
    for label, count in (
        ("attention heads", sizes.attention_heads),
        ("key-value heads", sizes.key_value_heads),
    ):
        splits_heads = any(
            style == "column" and pattern.endswith((".q_proj", ".k_proj", ".v_proj"))
            for pattern, style in plan.tensor.items()
        )
        if splits_heads and count % tensor:
            raise LayoutError(f"tensor={tensor} must divide the {count} {label} of {model_type}")


FAMILY = _TransformersFamily(
    name=ANY,
    config=TransformersModel,
    model=TransformersStage,
    plan=plan_of,
    weights=rules_of,
    needs_whole_rows="transformers' modules need all positions of a row on one rank",
)
