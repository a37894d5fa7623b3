"""Load and save models, by whichever library knows them."""

import importlib.util
import os
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn

from ms_align import processes
from ms_align.errors import ConfigError, ModelError
from ms_align.files.durable import writing
from ms_align.files.untrusted import check_parts, check_path
from ms_align.models.finite import check_module


def best_device() -> torch.device:
    """Return this process's accelerator; the CPU where the machine has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(found.type, index)


def load_model(folder: str | Path) -> nn.Module:
    """Read the model of a Hugging Face folder, through ms-parallel where it knows the architecture.

    It lies on this process's accelerator, where there is one.

    Raises:
        ModelError: there is no model, or it cannot be read.
        ConfigError: neither ms-parallel nor transformers is installed.
    """
    check_path("a model", folder, error=ModelError)
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; give the folder of a model")
    others = importlib.util.find_spec("transformers") is not None
    if importlib.util.find_spec("ms_parallel"):
        import ms_parallel

        try:
            return ms_parallel.load_model(path, device=best_device())
        except ms_parallel.ParallelError as error:
            if not others or _is_known(path):
                raise ModelError(str(error)) from error
    if others:
        return check_module(path, _from_transformers(path)).to(best_device())
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
        made: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
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


def save_model(model: nn.Module, folder: Path) -> None:
    """Write a model as its library does; a plain module's weights as `model.safetensors`.

    Raises:
        CheckpointError: the place cannot be written.
    """
    with writing(folder):
        if hasattr(model, "save_pretrained"):
            if processes.rank() == 0:
                cast(Any, model).save_pretrained(folder)
        elif _is_staged(model):
            import ms_parallel

            ms_parallel.save_model(cast(Any, model), folder)
        elif processes.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            unique = {}
            for name, tensor in model.state_dict().items():
                unique[name] = tensor.detach().cpu().contiguous().clone()
            save_file(unique, folder / "model.safetensors")


def _is_staged(model: nn.Module) -> bool:
    """Return whether it is a model of ms-parallel."""
    if importlib.util.find_spec("ms_parallel") is None:
        return False
    from ms_parallel.models import StagedModel

    return isinstance(model, StagedModel)
