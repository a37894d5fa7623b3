"""The output head of a model or stage, and whether it is tied: decided here, and nowhere else."""

from typing import Any

from attrs import frozen
from torch import nn

HEAD = "lm_head"


@frozen(kw_only=True)
class Head:
    """Which layers of a model, or of this process's stage of it, the output head is made of."""

    layer: str | None
    """Name of the layer called `lm_head`; None where the model has the head as a weight alone."""
    embeddings: frozenset[str]
    """Names of embeddings whose weight the head uses."""
    is_tied: bool
    """The head has no weight of its own: the configuration says so, and no layer here denies it. A
    stage without an embedding is taken at its configuration's word; a model that was built tied
    may have been given a head of its own since."""


def find_head(model: nn.Module) -> Head:
    """Find the output head of a model or stage."""
    config: Any = getattr(model, "config", None)
    said = bool(getattr(config, "tie_word_embeddings", False))
    named = dict(model.named_modules())
    layer = next((name for name in named if name.endswith(HEAD)), None)
    embeddings = {name: each for name, each in named.items() if isinstance(each, nn.Embedding)}
    uses = frozenset(
        name
        for name, each in embeddings.items()
        if (said if layer is None else named[layer].weight is each.weight)
    )
    return Head(layer=layer, embeddings=uses, is_tied=said and (bool(uses) or not embeddings))
