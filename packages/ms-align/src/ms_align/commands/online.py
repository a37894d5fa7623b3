"""`ms-align ppo | grpo | rloo`: a trainer's settings, its prompts, and its reward by name."""

import importlib
from functools import partial
from typing import Any

from ms_align.commands.command import Command
from ms_align.errors import ConfigError
from ms_align.reward_model import RewardModel
from ms_align.run_file import build
from ms_align.trainers.grpo import GRPOTrainer
from ms_align.trainers.online import OnlineTrainer
from ms_align.trainers.ppo import PPOTrainer
from ms_align.trainers.rloo import RLOOTrainer

__all__ = ["COMMANDS", "reward_named"]

DATASETS = ("prompt_dataset", "response_dataset")


def reward_named(name: Any, where: str) -> Any:
    """The reward that a run file's setting stands for.

    Args:
        name: `package.module:function`, a folder that `ms-align reward` wrote, or a table of names
            to these.
        where: the file, for messages.

    Raises:
        ConfigError: it names nothing that can be imported.
        ModelError: the folder holds no reward model.
    """
    if isinstance(name, dict):
        return {key: reward_named(value, where) for key, value in name.items()}
    if isinstance(name, list):
        return [reward_named(each, where) for each in name]
    if not isinstance(name, str):
        raise ConfigError(f"{where}: reward_model is {name!r}; give 'package.module:function'")
    module, colon, attribute = name.partition(":")
    if not colon:
        return RewardModel.load(name)
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            f"{where}: reward_model {name!r} cannot be imported: {error}; the folder of its module "
            "must be on the path (PYTHONPATH)"
        ) from error


def _run(kind: type[OnlineTrainer], settings: dict[str, Any], where: str) -> int:
    datasets = {name: settings.pop(name) for name in DATASETS if name in settings}
    for name in ("policy_model", "reward_model"):
        if name not in settings:
            raise ConfigError(f"{where}: {name} is missing; add it")
    if "prompt_dataset" not in datasets:
        raise ConfigError(f"{where}: prompt_dataset is missing; give a JSON Lines file of prompts")
    settings["reward_model"] = reward_named(settings["reward_model"], where)
    return 0 if build(kind, settings, where=where).optimize(**datasets).finished else 1


COMMANDS = tuple(
    Command(
        name=name,
        help=text,
        example=f"ms-align {name} RUN.toml --set steps=200 --set learning_rate=1e-5",
        run=partial(_run, kind),
    )
    for name, text, kind in (
        ("ppo", "optimise a reward by PPO; the same command goes on", PPOTrainer),
        ("grpo", "optimise a reward by GRPO; the same command goes on", GRPOTrainer),
        ("rloo", "optimise a reward by RLOO; the same command goes on", RLOOTrainer),
    )
)
