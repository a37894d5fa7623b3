"""Rewards by name: a function of a module, or the folder of a reward model."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ms_align.errors import ConfigError, ModelError
from ms_align.files.untrusted import check_parts
from ms_align.models.finite import check_module
from ms_align.models.folder import folder_of, pick_device
from ms_align.models.reward_model import RewardModel, is_reward_model


def named_rewards(given: Any) -> Any:
    """Replace each text or path in rewards by what it names.

    Args:
        given: `package.module:function`, the folder of a reward model, a list of these, or a table
            of names to these or to pairs with a weight; whatever else stays as it is.

    Raises:
        ConfigError: a text names nothing that can be imported.
        ModelError: a folder holds no reward model.
    """
    if isinstance(given, Mapping):
        return {key: _weighted(value) for key, value in given.items()}
    if isinstance(given, list):
        return [named_rewards(each) for each in given]
    if isinstance(given, Path) or (isinstance(given, str) and ":" not in given):
        return _from_folder(Path(given))
    if not isinstance(given, str):
        return given
    module, _, attribute = given.partition(":")
    here = os.getcwd()
    if here not in sys.path:  # as `python -m` has it, and ms-parallel for its own modules
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            f"reward_model {given!r} cannot be imported: {error}; give module:function of a module "
            "in this folder or on PYTHONPATH, or a folder of a reward model"
        ) from error


def reward_folders(given: Any) -> list[Path]:
    """List the folders of the reward models among rewards, as `named_rewards` takes them."""
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        return [folder for each in given for folder in reward_folders(each)]
    if isinstance(given, str) and ":" in given:
        return []
    folder = folder_of(given)
    return [folder] if folder is not None and folder.is_dir() else []


def _weighted(value: Any) -> Any:
    """Read a reward, or a pair of one and its weight, which a run file writes as a list."""
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], int | float):
        return named_rewards(value[0]), float(value[1])
    return named_rewards(value)


def _from_folder(folder: Path) -> nn.Module:
    if is_reward_model(folder) or not (folder / "config.json").is_file():
        return RewardModel.load(folder)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f"reading the classifier {folder} needs transformers: ms-align[hf]")
    from transformers import AutoModelForSequenceClassification

    check_parts(folder, error=ModelError)
    try:
        made: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, output_loading_info=True
        )
    except Exception as error:  # each kind of damage has an error of its own
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder} cannot be read as a reward model: {reason}") from error
    model, found = made
    missing = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if missing or model.config.num_labels != 1:
        what = f"lacks {missing[0]!r}" if missing else f"gives {model.config.num_labels} scores"
        raise ModelError(
            f"{folder} holds no reward model: it {what}; train one with `ms-align reward`"
        )
    return check_module(folder, model).to(pick_device())
