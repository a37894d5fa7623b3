"""Load and save models, by whichever library knows them."""

import importlib.util
import math
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ms_align import processes
from ms_align.errors import ConfigError, ModelError, NonFiniteError
from ms_align.files.durable import write_file, writing
from ms_align.files.model_name import missing_model
from ms_align.files.tokenizer_source import json_text
from ms_align.files.untrusted import check_file, check_parts, check_path, read_json
from ms_align.models.finite import check_module, first_not_finite
from ms_align.settings import shown

ADAPTER = "adapter_config.json"
FLOATS = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Names of dtypes in safetensors files."""


def folder_of(model: Any) -> Path | None:
    """Return the folder that a model is, or was read from; None if there is none.

    For the folder of an adapter it is that of the model which the adapter is for.
    """
    given = model if isinstance(model, str | Path) else getattr(model, "name_or_path", None)
    if not given or not isinstance(given, str | Path):
        return None
    folder = Path(given)
    base = adapter_base(folder)
    return folder if base is None else folder_of(base)


def adapter_base(folder: Path) -> Path | None:
    """Return the folder of the model that an adapter's folder is for; None if it is no adapter's.

    Raises:
        ModelError: adapter_config.json names no folder that is there, or adapters name each other
            in a circle.
    """
    base = _named_base(folder)
    seen, following = {folder.resolve()}, base
    while following is not None:  # an adapter may be for a model that has one itself
        if following.resolve() in seen:
            raise ModelError(
                f"{folder / ADAPTER}: base_model_name_or_path must lead to a model, and leads back "
                f"to {following}; set it to the folder of the model that the adapter is for"
            )
        seen.add(following.resolve())
        following = _named_base(following)
    return base


def _named_base(folder: Path) -> Path | None:
    path = folder / ADAPTER
    if not path.is_file() or (folder / "config.json").is_file():
        return None
    named = read_json(path, dict[str, Any], error=ModelError).get("base_model_name_or_path")
    if isinstance(named, str) and named:
        check_path(f"base_model_name_or_path of {path}", named, error=ModelError)
        for base in (Path(named), folder / named):
            if base.is_dir():
                return base
    raise ModelError(
        f"{path}: base_model_name_or_path must be the folder of the model that the adapter is for, "
        f"got {shown(named)}; set it to that folder"
    )


def pick_device(wanted: str | None = None) -> torch.device:
    """Return a device by its name; by default this process's accelerator, else the CPU.

    Raises:
        ConfigError: the machine has no such accelerator.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if wanted is not None and wanted != "cpu":
        kind, _, number = wanted.partition(":")
        has = "no accelerator" if found is None else found.type
        if found is None or found.type != kind:
            raise ConfigError(
                f"device must be one of this machine, which has {has}, got {wanted!r}"
            )
        if number and int(number) >= torch.accelerator.device_count():
            count = torch.accelerator.device_count()
            raise ConfigError(
                f"device must be below {kind}:{count} on this machine, got {wanted!r}"
            )
        if number:
            return torch.device(wanted)
    if found is None or wanted == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(found.type, index)


def load_model(folder: str | Path, *, device: str | None = None) -> nn.Module:
    """Read the model of a Hugging Face folder, through ms-parallel where it knows the architecture.

    Args:
        folder: with a config.json and weights; they become float32.
        device: where the model is put; by default this process's accelerator, else the CPU.

    Raises:
        ModelError: there is no model, or it cannot be read.
        ConfigError: neither ms-parallel nor transformers is installed, or there is no such device.
    """
    check_path("a model", folder, error=ModelError)
    path = Path(folder)
    if (problem := missing_model(str(folder))) is not None:
        raise ModelError(f"the model must be a local folder: {problem}")
    if not (path / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; give the folder of a model")
    place = pick_device(device)
    others = importlib.util.find_spec("transformers") is not None
    if importlib.util.find_spec("ms_parallel"):
        import ms_parallel

        try:
            return ms_parallel.load_model(path, device=place)
        except ms_parallel.ParallelError as error:
            if not others or _is_known(path):
                raise ModelError(str(error)) from error
    if others:
        return check_module(path, _from_transformers(path)).to(place)
    raise ConfigError(
        f"reading the model in {folder} needs ms-parallel or transformers; install "
        "ms-align[parallel] or ms-align[hf]"
    )


def _is_known(path: Path) -> bool:
    """Return whether the model is of ms-parallel's own families and its files can be read there."""
    from ms_parallel import ParallelError
    from ms_parallel.models import TransformersModel, architecture

    try:
        config = architecture(path)
    except ParallelError:
        return False
    return not isinstance(config, TransformersModel) and any(path.glob("*.safetensors"))


def _from_transformers(path: Path) -> nn.Module:
    """Read the model with transformers, and refuse one whose gaps it would fill at random."""
    from transformers import AutoModelForCausalLM

    check_parts(path, error=ModelError)
    try:
        made: Any = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, dtype=torch.float32
        )
    except Exception as error:  # each kind of damage has an error of its own
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path} cannot be read: {reason}; is it whole?") from error
    model, found = made
    for what in ("missing_keys", "mismatched_keys"):
        if found[what]:
            names = sorted(one if isinstance(one, str) else one[0] for one in found[what])
            raise ModelError(
                f"{path} has {len(names)} {what.replace('_', ' ')}, first {names[0]!r}, for which "
                "random numbers would be taken; copy it again"
            )
    return cast(nn.Module, model)


def save_model(model: nn.Module, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a model as its library does; a plain module's weights as `model.safetensors`.

    Args:
        model: stays as it is.
        folder: to write.
        dtype: of the parameters in the files; by default their own. Buffers keep theirs.

    Raises:
        CheckpointError: the place cannot be written.
        NonFiniteError: a weight does not fit into `dtype`.
    """
    with writing(folder):
        if hasattr(model, "save_pretrained"):
            if processes.rank() == 0:
                if dtype is None:
                    cast(Any, model).save_pretrained(folder)
                else:
                    cast(Any, model).save_pretrained(folder, state_dict=_converted(model, dtype))
                    _write_dtype(folder / "config.json", dtype)
        elif _is_staged(model):
            import ms_parallel

            ms_parallel.save_model(cast(Any, model), folder, dtype=dtype)
        elif processes.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            unique = {}
            for name, tensor in _converted(model, dtype).items():
                unique[name] = tensor.detach().cpu().contiguous().clone()
            save_file(unique, folder / "model.safetensors")


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Find the dtype that most numbers of a model's folder have; None where that is no float.

    Quantized weights, such as FP8 with scales, are none: what is trained from them is float32.
    """
    counts: Counter[str] = Counter()
    with suppress(OSError, SafetensorError):
        for path in sorted(folder.glob("*.safetensors")):
            check_file(path, error=ModelError)
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name)
                    counts[part.get_dtype()] += math.prod(part.get_shape())
    if not counts:  # files of another kind
        config = read_json(folder / "config.json", dict[str, Any], error=ModelError)
        return getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
    return FLOATS.get(counts.most_common(1)[0][0])


def experts_of(model: Any) -> int | None:
    """Return the number of routed experts of a model or a model's folder; None for none."""
    config: Any = getattr(model, "config", None)
    if isinstance(model, str | Path):
        path = Path(model) / "config.json"
        config = read_json(path, dict[str, Any], error=ModelError) if path.is_file() else None
    for part in (config, _value(config, "text_config")):
        for name in ("n_routed_experts", "num_local_experts", "num_experts"):
            count = _value(part, name)
            if isinstance(count, int) and count > 1:
                return count
    return None


def _value(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _converted(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return a state dict whose parameters have a dtype."""
    state = model.state_dict()
    if dtype is None:
        return state
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = {
        name: tensor.to(dtype) if name in names and tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    name = first_not_finite(found)
    if name is not None:
        raise NonFiniteError(
            f"{name!r} must be finite in {str(dtype).removeprefix('torch.')} to be saved and is "
            "not; set save_dtype to float32"
        )
    return found


def _write_dtype(path: Path, dtype: torch.dtype) -> None:
    """Name the dtype of the weights beside it in a config.json."""
    document = read_json(path, dict[str, Any], error=ModelError)
    for config in (document, document.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(config, dict) and key in config:
                config[key] = str(dtype).removeprefix("torch.")
    write_file(path, json_text(document))


def _is_staged(model: nn.Module) -> bool:
    """Return whether it is a model of ms-parallel."""
    if importlib.util.find_spec("ms_parallel") is None:
        return False
    from ms_parallel.models import StagedModel

    return isinstance(model, StagedModel)
