"""Select a model's layers: linear layers, embeddings and head, except for exceptions."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ms_compress.arguments import check_items, check_type
from ms_compress.errors import ConfigError, LayerError
from ms_compress.models.experts import routers
from ms_compress.models.head import find_head
from ms_compress.quantization.layers import Prepared


def select(
    model: nn.Module,
    ignore: Sequence[str] = (),
    *,
    embeddings: bool = False,
    head: bool = False,
) -> list[tuple[str, nn.Module]]:
    """Select layers to prepare or prune; returns names and layers in the model's order.

    Args:
        model: a complete model or a pipeline stage.
        ignore: name patterns to exclude, such as `"*.down_proj"`.
        embeddings: also select embeddings.
        head: also select `lm_head`, or the embedding whose weight it uses.

    Raises:
        ConfigError: an exception matches nothing.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module", error=LayerError)
    check_items("ignore", ignore, str, "name patterns", error=ConfigError)
    output = find_head(model)
    unused = set(ignore)
    selected = []
    excluded = routers(model)
    for name, layer in model.named_modules():
        if not _has_matrix(layer) or name in excluded:
            continue
        matched = {pattern for pattern in ignore if fnmatchcase(name, pattern)}
        unused -= matched
        if matched or (name == output.layer and not head):
            continue
        is_requested = embeddings or (head and name in output.embeddings)
        if is_requested or not isinstance(layer, nn.Embedding):
            selected.append((name, layer))
    is_complete = getattr(model, "first", True) and getattr(model, "last", True)
    if unused and is_complete:  # on a pipeline stage, exceptions may match other stages
        example = f"; a layer is named {selected[0][0]!r}" if selected else ""
        raise ConfigError(
            f"the exception {min(unused)!r} matches no layer of {type(model).__name__}{example}"
        )
    return selected


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a decoder's layers with their names.

    Raises:
        LayerError: the model has no `model.layers`.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleDict | nn.ModuleList) or not len(layers):
        raise LayerError(
            f"{type(model).__name__} has no model.layers; use a decoder from ms-parallel or"
            " transformers"
        )
    return [(f"model.layers.{key}", block) for key, block in layers.named_children()]


def _has_matrix(layer: nn.Module) -> bool:
    """Return whether a layer has a matrix: a linear layer, an embedding, or an unsupported layer.

    Unsupported are experts in one 3D tensor, convolutions and parametrized layers.
    """
    params = layer._parameters.values()
    return isinstance(layer, Prepared) or any(
        param is not None and param.ndim >= 2 for param in params
    )
