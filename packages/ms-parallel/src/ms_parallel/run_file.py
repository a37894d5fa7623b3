"""Run files: a TOML table of exactly the settings that `DistributedTrainer` takes."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import field, fields, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.model_name import missing_dataset, missing_model
from ms_parallel.files.toml_text import toml_text
from ms_parallel.planner.record.plan_file import Plan
from ms_parallel.settings import valid_path
from ms_parallel.settings.keys import groups_of
from ms_parallel.settings.run_file import override, read_settings
from ms_parallel.settings.synonyms import nearest_key
from ms_parallel.training.options import Length, Options

KEYS = {"model": "model_arch", "dataset": "dataset_path", "layout": "parallel_config"}
"""What a file calls the arguments whose names in Python are older."""
OTHER = "parallel_config"
"""What `DistributedTrainer` calls the layout is known in files too."""
LENGTH = ("epochs", "steps")
NOT_IN_FILES = ("on_event", "model_arch", "parallel_config")


@frozen(kw_only=True)
class RunFile:
    """What a file says: the options of a run, its dataset and its length."""

    options: Options
    dataset: str = field(validator=valid_path())
    length: Length


def read_run_file(
    path: str | Path, overrides: Sequence[str] = (), *, needs_data: bool = False
) -> RunFile:
    """Read a run file. Paths in it are relative to the current folder.

    Args:
        path: the file.
        overrides: `key=value` or `table.key=value`, the value as in TOML; text needs no quotes.
        needs_data: refuse a dataset that does not exist.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (the nearest known one is named),
            or a value cannot be used.
    """
    settings = read_settings(path)
    if OTHER in settings:
        if "layout" in settings:
            raise ConfigError(f"{path}: layout is given as {OTHER} too; give it once")
        settings["layout"] = settings.pop(OTHER)
    for text in overrides:
        override(settings, re.sub(rf"^\s*{OTHER}\b", "layout", text))
    try:
        return _run_file(settings, needs_data=needs_data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _run_file(settings: dict[str, Any], *, needs_data: bool) -> RunFile:
    _check_keys(settings)
    for key in ("model", "dataset"):
        if not isinstance(settings.get(key), str):
            raise ConfigError(f"{key} is missing; give a text, such as {key} = {EXAMPLES[key]!r}")
    if (problem := missing_model(settings["model"])) is not None:
        raise ConfigError(f"model must be an architecture or a local folder: {problem}")
    dataset = settings.pop("dataset")
    if needs_data and dataset != "stdlib":
        what = "a folder of shards or a corpus, or `stdlib`"
        if (problem := missing_dataset(dataset, what)) is not None:
            raise ConfigError(f"dataset must exist: {problem}")
    length = Length(**{key: settings.pop(key) for key in LENGTH if key in settings})
    renamed = {KEYS.get(key, key): value for key, value in settings.items()}
    return RunFile(options=Options(**renamed), dataset=dataset, length=length)


def write_planned(path: Path, overrides: Sequence[str], out: Path, plan: Plan) -> None:
    """Write a run file with the best layout of a plan, and all else as in another run file.

    Args:
        path: the other.
        overrides: changes of it, as `read_run_file` takes them.
        out: a new file.
        plan: what was found.

    Raises:
        ConfigError: `out` is there already.
        WriteError: it cannot be written.
    """
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; delete it or use another name")
    settings = read_settings(path)
    settings.pop(OTHER, None)
    for text in overrides:
        override(settings, re.sub(rf"^\s*{OTHER}\b", "layout", text))
    best = plan.best[0]
    settings |= {**best.settings, "layout": best.layout}
    if plan.num_hidden_layers is not None:
        model = settings.get("model_config", {})
        settings["model_config"] = {**model, "num_hidden_layers": plan.num_hidden_layers}
    with writing(out):
        write_file(out, toml_text(settings, title=f"{path}, planned").encode())


EXAMPLES = {"model": "llama", "dataset": "corpus/"}


def known_keys() -> list[str]:
    """List every key of a run file."""
    own = [f.name for f in fields(Options) if f.init and f.name not in NOT_IN_FILES]
    return [*KEYS, *LENGTH, *own]


def _check_keys(settings: dict[str, Any]) -> None:
    known = known_keys()
    for key in settings:
        if key not in known:
            raise ConfigError(_unknown(key, known))


def _unknown(key: str, known: Sequence[str]) -> str:
    """Say which known key is nearest, and look into the tables too."""
    # Read from the source, as importing the class would import torch.
    groups = groups_of("models.decoder_config:DecoderConfig")
    inside = {each.name: f"model_config.{each.name}" for group in groups for each in group.keys}
    inside |= {axis.name: f"layout.{axis.name}" for axis in fields(Layout)}
    if key in inside:
        return f"unknown key {key!r}; did you mean {inside[key]!r}?"
    return f"unknown key {key!r}; {nearest_key(key, known)}"
