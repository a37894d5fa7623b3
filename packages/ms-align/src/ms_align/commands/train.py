"""The commands that train: a run file's settings, handed to the trainer of the command's name."""

from pathlib import Path
from typing import Any

from ms_align.commands.launch import check_launched
from ms_align.entry import DONE, FAILED, INTERRUPTED
from ms_align.errors import ConfigError
from ms_align.run.loop import Result
from ms_align.settings.run_file import build
from ms_align.trainers.frame.offline import OfflineTrainer
from ms_align.trainers.frame.online import OnlineTrainer

ALSO = {"model": "policy_model", "dataset": "prompt_dataset"}
"""What all commands call them, beside what `PPOTrainer` and `optimize` do."""


def offline(kind: type[OfflineTrainer], settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Learn from a dataset that is there before the run."""
    dataset = _taken(settings, "dataset", where)
    trainer = build(kind, settings, where=where)
    check_launched(trainer.processes)
    return _facts(trainer.train(dataset), trainer.place)


def online(kind: type[OnlineTrainer], settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Learn from responses to prompts."""
    for short, face in ALSO.items():
        if short in settings and face in settings:
            raise ConfigError(f"{where}: {short} and {face} are one setting; give one of them")
        if short in settings:
            settings[face] = settings.pop(short)
    prompts = _taken(settings, "prompt_dataset", where)
    answers = settings.pop("response_dataset", None)
    trainer = build(kind, settings, where=where)
    check_launched(trainer.processes)
    return _facts(trainer.optimize(prompts, answers), trainer.place)


def _taken(settings: dict[str, Any], name: str, where: str) -> Any:
    if name not in settings:
        raise ConfigError(f"{where}: {name} is missing; add it")
    return settings.pop(name)


def _facts(result: Result, folder: Path) -> dict[str, Any]:
    """Build what `--json` prints; `code` is 130 after Ctrl-C and 1 after another signal."""
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
