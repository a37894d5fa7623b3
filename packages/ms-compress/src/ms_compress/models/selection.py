"""Selection of a model's layers: linear ones, embeddings, the head, less the exceptions."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ms_compress.errors import ConfigError, LayerError
from ms_compress.models.head import find_head
from ms_compress.quantisation.layers import Prepared


def select(
    model: nn.Module,
    exceptions: Sequence[str] = (),
    *,
    embeddings: bool = False,
    head: bool = False,
) -> list[tuple[str, nn.Module]]:
    """Select layers to prepare or prune; return names and layers, in the model's order.

    Args:
        model: whole, or a stage.
        exceptions: patterns of names that are left out, such as `"*.down_proj"`.
        embeddings: take embeddings too.
        head: take `lm_head` too, or the embedding whose weight it uses.

    Raises:
        ConfigError: an exception matches nothing.
    """
    output = find_head(model)
    unused = set(exceptions)
    chosen = []
    for name, layer in model.named_modules():
        if not _has_matrix(layer):
            continue
        matched = {pattern for pattern in exceptions if fnmatchcase(name, pattern)}
        unused -= matched
        if matched or (name == output.layer and not head):
            continue
        meant = embeddings or (head and name in output.embeddings)
        if meant or not isinstance(layer, nn.Embedding):
            chosen.append((name, layer))
    whole = getattr(model, "first", True) and getattr(model, "last", True)
    if unused and whole:  # a pipeline stage has not all layers
        example = f"; one of them is {chosen[0][0]!r}" if chosen else ""
        raise ConfigError(
            f"the exception {min(unused)!r} matches no layer of {type(model).__name__}{example}"
        )
    return chosen


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a decoder's layers with their names.

    Raises:
        LayerError: it has none where decoders have them.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleDict | nn.ModuleList) or not len(layers):
        raise LayerError(f"{type(model).__name__} has no model.layers; it is no decoder we know")
    return [(f"model.layers.{key}", block) for key, block in layers.named_children()]


def _has_matrix(layer: nn.Module) -> bool:
    """Return whether a layer has its own matrix: linear, an embedding, or of a kind we refuse.

    Refused are experts held in one tensor of three dimensions, convolutions, parametrised layers.
    """
    own = layer._parameters.values()
    return isinstance(layer, Prepared) or any(each is not None and each.ndim >= 2 for each in own)
