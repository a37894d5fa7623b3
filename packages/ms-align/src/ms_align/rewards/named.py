"""Loads the rewards named in settings: functions in modules, and folders of reward models."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ms_align.entry import one_line
from ms_align.errors import ConfigError, ModelError
from ms_align.files.untrusted import check_parts
from ms_align.models.finite import check_module
from ms_align.models.folder import folder_of, pick_device
from ms_align.models.reward_model import RewardModel, is_reward_model
from ms_align.rewards.scoring import Sample

ENVIRONMENT = "environment"
"""Name of the built-in reward that sums the environment's rewards."""


def environment(samples: Sequence[Sample]) -> list[float]:
    """Return the sum of the environment's rewards in each episode.

    Raises:
        ConfigError: the run has no environment.
    """
    rewards = [sample.environment_reward for sample in samples]
    if None in rewards:
        raise ConfigError(
            "reward_model = 'environment' needs an environment; set `environment` to module:Class"
        )
    return [float(reward) for reward in rewards if reward is not None]


def named_rewards(rewards: Any) -> Any:
    """Replace the names and paths in a `reward_model` setting by the rewards themselves.

    Args:
        rewards: `package.module:function`, the folder of a reward model, a list of these, or a
            table of names to these or to pairs with a weight. Other objects are returned as they
            are.

    Raises:
        ConfigError: a name cannot be imported.
        ModelError: a folder does not contain a reward model.
    """
    if isinstance(rewards, Mapping):
        return {key: _weighted(value) for key, value in rewards.items()}
    if isinstance(rewards, list):
        return [named_rewards(item) for item in rewards]
    if rewards == ENVIRONMENT:
        return environment
    if isinstance(rewards, Path) or (isinstance(rewards, str) and ":" not in rewards):
        return _from_folder(Path(rewards))
    if not isinstance(rewards, str):
        return rewards
    module, _, attribute = rewards.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:  # as with `python -m`, and as ms-parallel does for its modules
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(
            f"reward_model {rewards!r} cannot be imported: {error}; use module:function with a "
            "module in this folder or on PYTHONPATH, or the folder of a reward model"
        ) from error


def reward_folders(rewards: Any) -> list[Path]:
    """List the folders of reward models in a `reward_model` setting."""
    if isinstance(rewards, Mapping):
        rewards = list(rewards.values())
    if isinstance(rewards, list | tuple):
        return [folder for item in rewards for folder in reward_folders(item)]
    if isinstance(rewards, str) and (":" in rewards or rewards == ENVIRONMENT):
        return []
    folder = folder_of(rewards)
    return [folder] if folder is not None and folder.is_dir() else []


def _weighted(value: Any) -> Any:
    """Load a reward or a pair (reward, weight), which a run file writes as a list."""
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
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, output_loading_info=True
        )
    except Exception as error:  # transformers raises many types for damaged files
        reason = one_line(str(error))[:200]
        raise ModelError(f"{folder} cannot be read as a reward model: {reason}") from error
    model, info = loaded
    missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if missing or model.config.num_labels != 1:
        problem = f"lacks {missing[0]!r}" if missing else f"has {model.config.num_labels} outputs"
        raise ModelError(
            f"{folder} is not a reward model: it {problem}; train one with `ms-align reward`"
        )
    return check_module(folder, model).to(pick_device())
