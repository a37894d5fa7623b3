"""`ms-align ppo | grpo | rloo`: a trainer's settings, its prompts, and its reward by name."""

from typing import Any

from ms_align.commands.facts import facts_of
from ms_align.errors import ConfigError
from ms_align.settings.run_file import build, refuse_renamed
from ms_align.trainers.frame.online import OnlineTrainer
from ms_align.trainers.grpo import GRPOTrainer
from ms_align.trainers.ppo import PPOTrainer
from ms_align.trainers.rloo import RLOOTrainer

__all__ = ["grpo", "ppo", "rloo"]

DATASETS = ("prompt_dataset", "response_dataset")
ALSO = {"model": "policy_model", "dataset": "prompt_dataset"}
"""What all commands call them, beside what `PPOTrainer` and `optimize` do."""
RENAMED = {"data": "dataset", "out": "output_dir"}


def _run(kind: type[OnlineTrainer], settings: dict[str, Any], where: str) -> dict[str, Any]:
    refuse_renamed(settings, RENAMED, where=where)
    for short, face in ALSO.items():
        if short in settings and face in settings:
            raise ConfigError(f"{where}: {short} and {face} are one setting; give one of them")
        if short in settings:
            settings[face] = settings.pop(short)
    datasets = {name: settings.pop(name) for name in DATASETS if name in settings}
    for name in ("policy_model", "reward_model"):
        if name not in settings:
            raise ConfigError(f"{where}: {name} is missing; add it")
    if "prompt_dataset" not in datasets:
        raise ConfigError(f"{where}: prompt_dataset is missing; give a JSON Lines file of prompts")
    trainer = build(kind, settings, where=where)
    return facts_of(trainer.optimize(**datasets), trainer.place)


def ppo(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """`ms-align ppo`."""
    return _run(PPOTrainer, settings, where)


def grpo(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """`ms-align grpo`."""
    return _run(GRPOTrainer, settings, where)


def rloo(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """`ms-align rloo`."""
    return _run(RLOOTrainer, settings, where)
