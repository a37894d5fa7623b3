"""Which layers of a model are meant: linear ones, embeddings, the head, less the exceptions."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ms_compress.errors import ConfigError, LayerError
from ms_compress.quantisation.layers import Prepared

__all__ = ["blocks_of", "is_tied", "select"]


def select(
    model: nn.Module,
    exceptions: Sequence[str] = (),
    *,
    embeddings: bool = False,
    head: bool = False,
) -> list[tuple[str, nn.Module]]:
    """Names and layers, in the model's order.

    Args:
        model: whole, or a stage.
        exceptions: patterns of names that are left out, such as `"*.down_proj"`.
        embeddings: take embeddings too.
        head: take `lm_head` too, or the embedding whose weight it uses.

    Raises:
        ConfigError: an exception matches nothing.
    """
    unused = set(exceptions)
    chosen = []
    for name, layer in model.named_modules():
        if not _has_matrix(layer):
            continue
        matched = {pattern for pattern in exceptions if fnmatchcase(name, pattern)}
        unused -= matched
        if matched or (name.endswith("lm_head") and not head):
            continue
        meant = embeddings or (head and is_tied(model, layer))
        if meant or not isinstance(layer, nn.Embedding):
            chosen.append((name, layer))
    whole = getattr(model, "first", True) and getattr(model, "last", True)
    if unused and whole:  # a pipeline stage has not all layers
        example = f"; one of them is {chosen[0][0]!r}" if chosen else ""
        raise ConfigError(
            f"the exception {min(unused)!r} matches no layer of {type(model).__name__}{example}"
        )
    return chosen


def is_tied(model: nn.Module, embedding: nn.Module) -> bool:
    """Whether the head uses this embedding's weight."""
    head = next((m for n, m in model.named_modules() if n.endswith("lm_head")), None)
    if head is not None:
        return head.weight is embedding.weight
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder's layers with their names.

    Raises:
        LayerError: it has none where decoders have them.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleDict | nn.ModuleList) or not len(layers):
        raise LayerError(f"{type(model).__name__} has no model.layers; it is no decoder we know")
    return [(f"model.layers.{key}", block) for key, block in layers.named_children()]


def _has_matrix(layer: nn.Module) -> bool:
    """A layer with a matrix of its own: linear, an embedding, or of a kind we refuse.

    Such as experts held in one tensor of three dimensions, convolutions, and parametrised layers.
    """
    own = layer._parameters.values()
    return isinstance(layer, Prepared) or any(each is not None and each.ndim >= 2 for each in own)
