"""Keys of a run file in groups, and the run file that `ms-parallel init` writes."""

from attrs import evolve, fields

from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.settings import GROUPS, MODEL, EngineSettings
from ms_parallel.run_file import NOT_IN_FILES
from ms_parallel.settings.keys import Key, KeyGroup, class_path, groups_of
from ms_parallel.settings.template import template_text
from ms_parallel.training.options import Options

LENGTH = {
    "model": (
        "str",
        "An architecture (llama, qwen3, ...), or a folder with a Hugging Face config.json.",
    ),
    "dataset": ("str", "A folder of shards, or raw text: a file, a folder, or `stdlib`."),
    "steps": ("int | None", "Updates; or give epochs."),
    "epochs": ("float | None", "Passes over the training text; or give steps."),
    "layout": (
        "dict",
        "A table of axes: data, tensor, pipeline, context, expert, replicate; or `auto`.",
    ),
}
STARTER = {
    "model": "llama",
    "dataset": "corpus/",
    "steps": 1000,
    "model_config": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
}
"""Settings of the starter file: a small model that trains once `dataset` is filled in."""


def key_groups() -> list[KeyGroup]:
    """All keys of a run file with default and meaning, in groups."""
    axes = tuple(
        evolve(key, default=1, required=False)
        for group in groups_of(class_path(Layout))
        for key in group.keys
    )
    keys = {name: Key(name=name, kind=kind, meaning=text) for name, (kind, text) in LENGTH.items()}
    keys["layout"] = evolve(keys["layout"], inner=axes)
    keys |= {name: evolve(keys[name], required=True) for name in ("model", "dataset")}
    keys |= {key.name: key for group in groups_of(class_path(Options)) for key in group.keys}
    titles = dict.fromkeys(LENGTH, MODEL["group"])
    engine_settings = {setting.name for setting in fields(EngineSettings)}
    for of_engine in (False, True):  # settings of the run come first
        titles |= {
            setting.name: setting.metadata["group"]
            for setting in fields(Options)
            if setting.name not in NOT_IN_FILES and (setting.name in engine_settings) is of_engine
        }
    return [
        KeyGroup(title=title, keys=tuple(keys[name] for name in titles if titles[name] == title))
        for title in GROUPS
    ]


def template() -> str:
    """Return a run file that trains a small model once `dataset` is set; the rest are defaults."""
    return template_text("ms-parallel train RUN.toml", key_groups(), STARTER)
