"""Find the output head of a model or stage, and whether it is tied; the only place to decide it."""

from typing import Any

from attrs import frozen
from torch import nn

HEAD = "lm_head"


@frozen(kw_only=True)
class Head:
    """The output head of a model, or of this process's stage."""

    layer: str | None
    """Name of the layer `lm_head`; None if the model has the head only as a weight."""
    embeddings: frozenset[str]
    """Names of the embeddings whose weight the head uses."""
    is_tied: bool
    """The configuration says that the head is tied and no layer contradicts it. For a stage without
    an embedding, the configuration decides; a model built with a tied head may have been given a
    separate one later."""


def find_head(model: nn.Module) -> Head:
    """Find the output head of a model or stage."""
    config: Any = getattr(model, "config", None)
    tie_setting = bool(getattr(config, "tie_word_embeddings", False))
    modules = dict(model.named_modules())
    layer = next((name for name in modules if name.endswith(HEAD)), None)
    embeddings = {
        name: module for name, module in modules.items() if isinstance(module, nn.Embedding)
    }
    uses = frozenset(
        name
        for name, module in embeddings.items()
        if (tie_setting if layer is None else modules[layer].weight is module.weight)
    )
    return Head(
        layer=layer, embeddings=uses, is_tied=tie_setting and (bool(uses) or not embeddings)
    )
