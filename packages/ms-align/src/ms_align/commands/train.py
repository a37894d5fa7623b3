"""Training commands: build the trainer from a run file and start it."""

from pathlib import Path
from typing import Any

from ms_align.commands.launch import check_launched
from ms_align.entry import DONE, FAILED, INTERRUPTED
from ms_align.errors import ConfigError
from ms_align.run.loop import Result
from ms_align.settings.run_file import build
from ms_align.trainers.base.offline import OfflineTrainer
from ms_align.trainers.base.online import OnlineTrainer

PYTHON_NAMES = {"model": "policy_model", "dataset": "prompt_dataset"}
"""Keyword arguments of `PPOTrainer` and `optimize` for run-file keys."""


def offline(
    trainer_class: type[OfflineTrainer], settings: dict[str, Any], where: str
) -> dict[str, Any]:
    """Train on a fixed dataset."""
    dataset = _pop_required(settings, "dataset", where)
    trainer = build(trainer_class, settings, where=where)
    check_launched(trainer.processes)
    return _summary(trainer.train(dataset), trainer.run_dir)


def online(
    trainer_class: type[OnlineTrainer], settings: dict[str, Any], where: str
) -> dict[str, Any]:
    """Train on responses to prompts."""
    for key, argument in PYTHON_NAMES.items():
        if key in settings and argument in settings:
            raise ConfigError(f"{where}: {key} and {argument} are the same setting; remove one")
        if key in settings:
            settings[argument] = settings.pop(key)
    prompts = _pop_required(settings, "prompt_dataset", where)
    answers = settings.pop("response_dataset", None)
    trainer = build(trainer_class, settings, where=where)
    check_launched(trainer.processes)
    return _summary(trainer.optimize(prompts, answers), trainer.run_dir)


def _pop_required(settings: dict[str, Any], name: str, where: str) -> Any:
    if name not in settings:
        raise ConfigError(f"{where}: {name} is required; add it")
    return settings.pop(name)


def _summary(result: Result, folder: Path) -> dict[str, Any]:
    """Build the `--json` summary; `code` is 130 after Ctrl-C and 1 after another signal."""
    stopped = INTERRUPTED if result.signal_name == "SIGINT" else FAILED
    return {
        "code": DONE if result.finished else stopped,
        "finished": result.finished,
        "step": result.step,
        "seconds": round(result.seconds, 3),
        "first": dict(result.first),
        "last": dict(result.last),
        "output_dir": str(folder),
    }
