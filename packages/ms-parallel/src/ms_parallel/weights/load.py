"""Reads models from Hugging Face folders; under any layout, each process reads only its part."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ms_parallel.arguments import check_flags, check_type, shown
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
from ms_parallel.weights.quantized import open_weights
from ms_parallel.weights.text_part import TextPart

_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth")

_LEGACY_BUFFERS = (".rotary_emb.inv_freq",)


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
    """Build a model or one of its pipeline stages from a folder, and load its weights.

    Args:
        folder: folder with a config.json and safetensors files.
        dtype: dtype of the parameters; files in another dtype are converted.
        device: device of the parameters.
        ops: operator set; plain torch by default.
        layers: global indices of the blocks to build; all by default.
        first: build the embedding.
        last: build the final norm and the head.

    Raises:
        ModelError: the architecture or a setting is not supported; a tensor is missing, unknown,
            not finite or has another shape; or the copies of a tied weight differ.
    """
    check_path("folder", folder, error=ModelError)
    check_type("dtype", dtype, torch.dtype, "a torch.dtype", error=ModelError)
    check_type("layers", layers, range, "a range", error=ModelError, optional=True)
    check_flags(first=first, last=last, error=ModelError)
    if ops is not None and not hasattr(ops, "rms_norm"):
        raise ModelError(f"ops must be a set of operators, got {shown(ops)}; use None for torch's")
    target = _device(device)
    folder = Path(folder)
    config = read_config(folder)
    weights = _open(folder, config)
    # Checked before a config.json with a billion layers makes us build them.
    last_layer = f"model.layers.{config.num_hidden_layers - 1}."
    in_house = isinstance(config, ModelConfig)
    if in_house and not any(name.startswith(last_layer) for name in weights.names):
        raise ModelError(
            f"{folder} has no tensor of layer {config.num_hidden_layers - 1}, but its config.json"
            f" says num_hidden_layers={config.num_hidden_layers}; copy it again"
        )
    # On meta until the names and shapes have been checked.
    with torch.device("meta"):
        model = build_model(config, ops=ops, layers=layers, first=first, last=last).to(dtype)
    pieces = _check(model, weights)
    model.to_empty(device=target)
    _fill(model, weights, pieces)
    return model


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"device must be a torch.device or its name such as 'cpu', got {shown(device)}"
        ) from error


def has_weights(folder: str | Path) -> bool:
    """Return whether a folder has weights to start from, and not only a config.json.

    Raises:
        ModelError: the weights are pickled, which is not supported as pickles can run code.
    """
    check_path("folder", folder, error=ModelError)
    folder = Path(folder)
    if not os.path.isdir(folder):
        return False
    if any(folder.glob("*.safetensors")) or os.path.isfile(folder / INDEX):
        return True
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder / pickled[0]} is a pickle, which is not supported; convert it to safetensors,"
            " or keep only config.json in the folder to start from fresh weights"
        )
    return False


def load_weights(model: StagedModel, folder: str | Path) -> None:
    """Fill a model, any stage under any layout, with the weights of a folder, in place.

    Every process reads only its part. Parameters must not be on `meta`. Parameters that the engine
    has added, such as adapters, become zero.

    Args:
        model: plain, tensor-parallel or sharded model.
        folder: folder with safetensors files of the same model.

    Raises:
        ModelError: a tensor is missing, unknown, not finite or has another shape; or the copies of
            a tied weight differ.
    """
    if not hasattr(model, "config"):
        raise ModelError(f"model must be a torch.nn.Module with a config, got {shown(model)}")
    check_path("folder", folder, error=ModelError)
    weights = _open(Path(folder), model.config)
    drop_gathered(model)
    _fill(model, weights, _check(model, weights))


def _open(folder: Path, config: ModelConfig) -> WeightFolder:
    weights = open_weights(folder)
    return TextPart(weights) if getattr(config, "is_text_part", False) else weights


def _check(model: StagedModel, weights: WeightFolder) -> dict[str, list[WeightSlice]]:
    """Check the names of the full model and the shapes of this stage, before reading any value.

    Returns:
        Slices that make up each weight of this stage; none for added weights.
    """
    architecture = weight_slices(model.config)
    tensors = {piece.tensor for pieces in architecture.values() for piece in pieces}
    plan = model_plan(model.config)
    copies = {copy: owner for owner, copy in plan.tied}
    missing = sorted(tensors - weights.names)
    if missing:
        next_layer = f"model.layers.{model.config.num_hidden_layers}."
        dropped = not any(name.startswith(next_layer) for name in weights.names)
        remedy = "is it complete, and of this architecture?"
        if model.config.mtp_layers and dropped:
            remedy = "set num_nextn_predict_layers to 0 if its MTP layers were dropped"
        raise ModelError(
            f"{weights.folder} lacks {len(missing)} of {len(tensors)} tensors, first"
            f" {missing[0]!r}; {remedy}"
        )
    known_names = tensors | copies.keys() | {name for _, name in plan.repeated}
    unknown = sorted(n for n in weights.names - known_names if not n.endswith(_LEGACY_BUFFERS))
    if unknown:
        raise ModelError(
            f"{weights.folder} has {unknown[0]!r}, which the model of its config.json does not"
            f" have; {_name_hint(unknown[0], known_names) or 'this architecture is not supported'}"
        )
    # A tied copy reads its owner's tensor.
    stage_pieces = {
        name: architecture.get(copies.get(name, name), []) for name, _ in named_weights(model)
    }
    # Every weight of this stage must come from the folder, except added ones.
    unmatched = [
        name for name in stage_pieces if not stage_pieces[name] and not is_added(name, architecture)
    ]
    if unmatched:
        raise ModelError(
            f"{weights.folder} has no tensor for {unmatched[0]!r}, which its config.json does not"
            " define; load the weights before changing the model"
        )
    for piece in (piece for pieces in stage_pieces.values() for piece in pieces):
        shape = weights.shape(piece.tensor)
        if shape != piece.shape:
            raise ModelError(
                f"{weights.folder} has {piece.tensor!r} with shape {shape}, but its config.json"
                f" needs {piece.shape}; {_shape_hint(shape, piece.shape)}"
            )
    return stage_pieces


def _shape_hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Suggest the cause of a wrong shape; dim 0 of a 3D shape counts experts."""
    if shape in (expected[::-1], (*expected[:-2], *expected[:-3:-1])):
        return "it is transposed"
    if len(expected) == 3 and shape[1:] == expected[1:]:
        return f"it has {shape[0]} of {expected[0]} experts"
    return "fix config.json"


def _name_hint(name: str, known_names: Iterable[str]) -> str | None:
    """Return the valid range of a wrong number in a name, such as an expert index."""
    parts = re.split(r"(\d+)", name)  # numbers at odd indices
    skeleton = re.compile(
        "".join(r"(\d+)" if index % 2 else re.escape(part) for index, part in enumerate(parts))
    )
    # Known names that differ from it only in numbers.
    matches = [match for candidate in known_names if (match := skeleton.fullmatch(candidate))]
    for index in range(1, len(parts), 2):
        numbers = {int(match[(index + 1) // 2]) for match in matches}
        if numbers and int(parts[index]) not in numbers:
            return f"it asks for {''.join(parts[:index])}{min(numbers)} to {max(numbers)}"
    return None


@torch.no_grad()
def _fill(
    model: StagedModel, weights: WeightFolder, pieces: Mapping[str, Iterable[WeightSlice]]
) -> None:
    plan = model_plan(model.config)
    duplicates = (*plan.tied, *plan.repeated)
    for name, weight in named_weights(model):
        part = part_of(weight)
        if not pieces[name]:  # added by the engine, such as an adapter
            part.local.zero_()
        for piece in pieces[name] if part.local.numel() else ():
            inside = piece.within(part.box)
            if inside is None:  # the slice belongs to other ranks
                continue
            values = piece.to_parameter(weights.read(piece.tensor, inside[0]))
            if not is_finite(values):
                raise ModelError(
                    f"{weights.folder} has {piece.tensor!r} with a NaN or an infinity; use a model"
                    " that was saved before it diverged"
                )
            for pair in duplicates:
                if name in pair:
                    _check_tied(pair, values, part, weights)
            part.local[inside[1]].copy_(values)


def _check_tied(pair: tuple[str, str], values: Tensor, part: Part, weights: WeightFolder) -> None:
    """Reject a folder with two different tensors for one tied weight."""
    owner, copy = pair
    if copy in weights.names and not torch.equal(values, weights.read(copy, part.box).to(values)):
        remedy = "; copy the folder again"
        if copy == "lm_head.weight":
            remedy = " (tie_word_embeddings); set it to false to keep both"
        raise ModelError(
            f"{weights.folder} has a {copy!r} that differs from {owner!r}, but its config.json"
            f" ties them{remedy}"
        )
