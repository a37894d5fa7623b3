"""Run files: TOML tables with the settings of `DistributedTrainer`."""

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
from ms_parallel.training.options import USED_IF, Length, Options
from ms_parallel.used_settings import unused

KEYS = {"model": "model_arch", "dataset": "dataset_path", "layout": "parallel_config"}
"""Run-file keys whose arguments of `DistributedTrainer` have another name."""
LAYOUT_ALIAS = "parallel_config"
"""The trainer's name of the layout, which is accepted in run files too."""
LENGTH = ("epochs", "steps")
NOT_IN_FILES = ("on_event", "model_arch", "parallel_config")


@frozen(kw_only=True)
class RunFile:
    """Content of a run file: the options of a run, its dataset and its length."""

    options: Options
    dataset: str = field(validator=valid_path())
    length: Length


def read_run_file(
    path: str | Path, overrides: Sequence[str] = (), *, needs_data: bool = False
) -> RunFile:
    """Read a run file. Paths in it are relative to the working directory.

    Args:
        path: run file.
        overrides: `key=value` or `table.key=value` with a TOML value; text needs no quotes.
        needs_data: check that the dataset exists.

    Raises:
        ConfigError: the file cannot be read, a key is unknown (suggests the nearest), or a value is
            invalid.
    """
    settings = read_settings(path)
    if LAYOUT_ALIAS in settings:
        if "layout" in settings:
            raise ConfigError(f"{path}: set either layout or {LAYOUT_ALIAS}, got both")
        settings["layout"] = settings.pop(LAYOUT_ALIAS)
    for text in overrides:
        # Overrides may use the alias too.
        override(settings, re.sub(rf"^\s*{LAYOUT_ALIAS}\b", "layout", text))
    try:
        return _run_file(settings, needs_data=needs_data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _run_file(settings: dict[str, Any], *, needs_data: bool) -> RunFile:
    _check_keys(settings)
    for key in ("model", "dataset"):
        if not isinstance(settings.get(key), str):
            raise ConfigError(f"{key} must be set; add for example {key} = {EXAMPLES[key]!r}")
    if (problem := missing_model(settings["model"])) is not None:
        raise ConfigError(f"model must be an architecture or a local folder: {problem}")
    dataset = settings.pop("dataset")
    if needs_data and dataset != "stdlib":
        expected = "a folder of shards or a corpus, or `stdlib`"
        if (problem := missing_dataset(dataset, expected)) is not None:
            raise ConfigError(f"dataset must exist: {problem}")
    length = Length(**{key: settings.pop(key) for key in LENGTH if key in settings})
    renamed = {KEYS.get(key, key): value for key, value in settings.items()}
    return RunFile(options=Options(**renamed), dataset=dataset, length=length)


def write_planned(path: Path, overrides: Sequence[str], out: Path, plan: Plan) -> None:
    """Write a copy of a run file with the best layout of a plan.

    Args:
        path: run file to copy.
        overrides: overrides, as in `read_run_file`.
        out: file to write.
        plan: plan with the best layouts.

    Raises:
        ConfigError: `out` already exists.
        WriteError: the file cannot be written.
    """
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; delete it or use another name")
    settings = read_settings(path)
    settings.pop(LAYOUT_ALIAS, None)
    for text in overrides:
        override(settings, re.sub(rf"^\s*{LAYOUT_ALIAS}\b", "layout", text))
    best = plan.best[0]
    settings |= {**best.settings, "layout": best.layout}
    if plan.num_hidden_layers is not None:
        model = settings.get("model_config", {})
        settings["model_config"] = {**model, "num_hidden_layers": plan.num_hidden_layers}
    # Settings of what the plan has chosen, which a run would refuse.
    for name, _ in unused(_run_file(dict(settings), needs_data=False).options, USED_IF):
        settings.pop(name, None)
    with writing(out):
        write_file(out, toml_text(settings, title=f"{path}, planned").encode())


EXAMPLES = {"model": "llama", "dataset": "corpus/"}


def known_keys() -> list[str]:
    """All keys of a run file."""
    options = [f.name for f in fields(Options) if f.init and f.name not in NOT_IN_FILES]
    return [*KEYS, *LENGTH, *options]


def _check_keys(settings: dict[str, Any]) -> None:
    keys = known_keys()
    for key in settings:
        if key not in keys:
            raise ConfigError(_unknown(key, keys))


def _unknown(key: str, keys: Sequence[str]) -> str:
    """Error message for an unknown key, with the nearest key; keys of tables are searched too."""
    # Parsed from the source, since importing the class would import torch.
    groups = groups_of("models.decoder_config:DecoderConfig")
    table_keys = {
        setting.name: f"model_config.{setting.name}" for group in groups for setting in group.keys
    }
    table_keys |= {axis.name: f"layout.{axis.name}" for axis in fields(Layout)}
    if key in table_keys:
        return f"unknown key {key!r}; did you mean {table_keys[key]!r}?"
    return f"unknown key {key!r}; {nearest_key(key, keys)}"
