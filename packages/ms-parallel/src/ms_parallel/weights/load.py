"""Reads models from Hugging Face folders; under any layout each process reads only its part."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.files.untrusted import check_path
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import build_model, model_plan, read_config, weight_slices
from ms_parallel.models.staged import StagedModel, named_weights
from ms_parallel.models.weight_names import WeightSlice
from ms_parallel.operators.protocol import Ops
from ms_parallel.split.part import Part, drop_gathered, part_of
from ms_parallel.weights.folder import INDEX, WeightFolder, is_finite
from ms_parallel.weights.initial import is_added
from ms_parallel.weights.quantised import open_weights
from ms_parallel.weights.text_part import TextPart

_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth")

_BUFFERS_OF_OLD = (".rotary_emb.inv_freq",)


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> StagedModel:
    """Build the model of a folder, or one stage of it, and read its weights.

    Args:
        folder: With a config.json and safetensors.
        dtype: Of the parameters; files of another dtype are converted.
        device: Of the parameters.
        ops: Operators; plain torch by default.
        layers: Global numbers of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the final norm and the head.

    Raises:
        ModelError: the architecture or a setting is not supported, or a tensor is missing,
            unknown, of another shape or not finite, or a tied weight is there twice and differs.
    """
    check_path("folder", folder, error=ModelError)
    folder = Path(folder)
    config = read_config(folder)
    weights = _opened(folder, config)
    # Before a config.json that claims a billion layers makes us build them.
    last_layer = f"model.layers.{config.num_hidden_layers - 1}."
    own = isinstance(config, ModelConfig)
    if own and not any(name.startswith(last_layer) for name in weights.names):
        raise ModelError(
            f"{folder} holds no tensor of layer {config.num_hidden_layers - 1}, but its"
            f" config.json says num_hidden_layers={config.num_hidden_layers}; copy it again"
        )
    with torch.device("meta"):
        model = build_model(config, ops=ops, layers=layers, first=first, last=last).to(dtype)
    pieces = _check(model, weights)
    model.to_empty(device=device)
    _fill(model, weights, pieces)
    return model


def has_weights(folder: str | Path) -> bool:
    """Return whether a folder holds weights to start from; False where config.json stands alone.

    Raises:
        ModelError: they are in files that are not read here, as they could hold code.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        return False
    if any(folder.glob("*.safetensors")) or os.path.isfile(folder / INDEX):
        return True
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder / pickled[0]} is a pickle, which is not read; convert it to safetensors, or"
            " leave config.json alone in its folder to start from fresh weights"
        )
    return False


def load_weights(model: StagedModel, folder: str | Path) -> None:
    """Fill a model, any stage under any layout, with the weights of a folder, in place.

    Every process reads only its part. Parameters must not be on `meta`. Those that a preparation of
    the engine added become zero.

    Args:
        model: Plain, tensor-parallel or sharded.
        folder: With safetensors of the same model.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape or not finite, or a tied weight
            is there twice and differs.
    """
    weights = _opened(Path(folder), model.config)
    drop_gathered(model)
    _fill(model, weights, _check(model, weights))


def _opened(folder: Path, config: ModelConfig) -> WeightFolder:
    weights = open_weights(folder)
    return TextPart(weights) if getattr(config, "is_text_part", False) else weights


def _check(model: StagedModel, weights: WeightFolder) -> dict[str, list[WeightSlice]]:
    """Check the names of the whole model, and shapes of this stage, before any value is read.

    Returns:
        What makes up each of this stage's weights; none for those that were added.
    """
    whole = weight_slices(model.config)
    tensors = {piece.tensor for pieces in whole.values() for piece in pieces}
    plan = model_plan(model.config)
    copies = {copy: owner for owner, copy in plan.tied}
    missing = sorted(tensors - weights.names)
    if missing:
        behind = f"model.layers.{model.config.num_hidden_layers}."
        dropped = not any(name.startswith(behind) for name in weights.names)
        remedy = "is it complete, and of this architecture?"
        if model.config.mtp_layers and dropped:
            remedy = "set num_nextn_predict_layers to 0 where its layers were dropped"
        raise ModelError(
            f"{weights.folder} lacks {len(missing)} of {len(tensors)} tensors, first"
            f" {missing[0]!r}; {remedy}"
        )
    known = tensors | copies.keys() | {name for _, name in plan.repeated}
    unknown = sorted(n for n in weights.names - known if not n.endswith(_BUFFERS_OF_OLD))
    if unknown:
        raise ModelError(
            f"{weights.folder} holds {unknown[0]!r}, which the model of its config.json does not"
            f" have; {_what_fits(unknown[0], known) or 'this architecture is not supported'}"
        )
    own = {name: whole.get(copies.get(name, name), []) for name, _ in named_weights(model)}
    strange = [name for name in own if not own[name] and not is_added(name, whole)]
    if strange:
        raise ModelError(
            f"{weights.folder} holds no tensor for {strange[0]!r}, which its config.json does not"
            " ask for; read the folder before the model is changed"
        )
    for piece in (piece for pieces in own.values() for piece in pieces):
        shape = weights.shape(piece.tensor)
        if shape != piece.shape:
            raise ModelError(
                f"{weights.folder} holds {piece.tensor!r} with shape {shape}, but its config.json"
                f" asks for {piece.shape}; {_what_differs(shape, piece.shape)}"
            )
    return own


def _what_differs(found: tuple[int, ...], asked: tuple[int, ...]) -> str:
    """Say what is wrong with a shape, whose dim 0 counts experts where it has three."""
    if found in (asked[::-1], (*asked[:-2], *asked[:-3:-1])):
        return "it is transposed"
    if len(asked) == 3 and found[1:] == asked[1:]:
        return f"it holds {found[0]} of {asked[0]} experts"
    return "mend config.json"


def _what_fits(name: str, known: Iterable[str]) -> str | None:
    """Say which numbers fit a name whose numbers alone are unknown, such as those of experts."""
    parts = re.split(r"(\d+)", name)  # numbers at the odd places
    skeleton = re.compile(
        "".join(r"(\d+)" if place % 2 else re.escape(part) for place, part in enumerate(parts))
    )
    alike = [found for each in known if (found := skeleton.fullmatch(each))]
    for place in range(1, len(parts), 2):
        numbers = {int(found[(place + 1) // 2]) for found in alike}
        if numbers and int(parts[place]) not in numbers:
            return f"it asks for {''.join(parts[:place])}{min(numbers)} to {max(numbers)}"
    return None


@torch.no_grad()
def _fill(
    model: StagedModel, weights: WeightFolder, pieces: Mapping[str, Iterable[WeightSlice]]
) -> None:
    plan = model_plan(model.config)
    twice = (*plan.tied, *plan.repeated)
    for name, weight in named_weights(model):
        part = part_of(weight)
        if not pieces[name]:
            part.local.zero_()
        for piece in pieces[name] if part.local.numel() else ():
            inside = piece.within(part.box)
            if inside is None:
                continue
            values = piece.to_parameter(weights.read(piece.tensor, inside[0]))
            if not is_finite(values):
                raise ModelError(
                    f"{weights.folder} holds {piece.tensor!r} with a NaN or an infinity; give a"
                    " model that was saved before it went wrong"
                )
            for pair in twice:
                if name in pair:
                    _check_tied(pair, values, part, weights)
            part.local[inside[1]].copy_(values)


def _check_tied(pair: tuple[str, str], values: Tensor, part: Part, weights: WeightFolder) -> None:
    """Refuse a folder whose two files of one weight differ: readers would take one or the other."""
    owner, copy = pair
    if copy in weights.names and not torch.equal(values, weights.read(copy, part.box).to(values)):
        remedy = "; copy the folder again"
        if copy == "lm_head.weight":
            remedy = " (tie_word_embeddings); set it to false to keep both"
        raise ModelError(
            f"{weights.folder} holds a {copy!r} that differs from {owner!r}, but its config.json"
            f" says that they are one{remedy}"
        )
