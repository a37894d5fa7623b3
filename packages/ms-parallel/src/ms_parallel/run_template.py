"""The keys of a run file in groups, and as a file to begin with."""

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
BEGIN = {
    "model": "llama",
    "dataset": "corpus/",
    "steps": 1000,
    "model_config": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
}
"""A small model once `dataset` is filled in."""


def key_groups() -> list[KeyGroup]:
    """Every key of a run file with its default and meaning, in groups."""
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
    shared = {each.name for each in fields(EngineSettings)}
    for late in (False, True):  # a run's own settings first
        titles |= {
            each.name: each.metadata["group"]
            for each in fields(Options)
            if each.name not in NOT_IN_FILES and (each.name in shared) is late
        }
    return [
        KeyGroup(title=title, keys=tuple(keys[name] for name in titles if titles[name] == title))
        for title in GROUPS
    ]


def template() -> str:
    """Write a run file that trains a small model once it names a dataset; the rest is default."""
    return template_text("ms-parallel train RUN.toml", key_groups(), BEGIN)
