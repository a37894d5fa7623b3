"""What each process does in the tests of model folders; see `test_huggingface.py`."""

import torch

from ms_parallel.errors import ModelError
from ms_parallel.groups import Groups, connect
from ms_parallel.layout import Layout
from ms_parallel.models import (
    StagedModel,
    architecture,
    initialise,
    load_weights,
    model_plan,
    save_model,
)
from ms_parallel.models.part import part_of
from ms_parallel.stages import build_stage, cut_layers


def stage_of(source: str, groups: Groups) -> StagedModel:
    """This process's stage of the model of a folder, its weights not yet set."""
    config = architecture(source)
    layers = cut_layers(config.num_hidden_layers, groups.layout.pipeline, model_plan(config).cuts)
    return build_stage(
        config,
        layers[groups.place.pipeline],
        groups,
        mixed_precision=False,
        recompute="none",
        ops=None,
    )


def load_and_save(layout: str, folders: list[tuple[str, str]], file_size_bytes: int) -> list[int]:
    """Read each first folder by parts, write it again to the second; the numbers held here."""
    groups = connect(Layout.parse(layout), device="cpu")
    held = []
    for source, target in folders:
        stage = stage_of(source, groups)
        load_weights(stage, source)
        save_model(stage, target, file_size_bytes=file_size_bytes)
        with torch.no_grad():
            held.append(sum(part_of(parameter).local.numel() for parameter in stage.parameters()))
    return held


def initialise_and_save(layout: str, folders: list[tuple[str, str]], seed: int) -> None:
    """Write a fresh model of each first folder's configuration to the second."""
    groups = connect(Layout.parse(layout), device="cpu")
    for source, target in folders:
        stage = stage_of(source, groups)
        initialise(stage, seed)
        save_model(stage, target)


def save_to_a_file(layout: str, source: str, target: str) -> str:
    """Save where a folder cannot be made: the error of this process."""
    stage = stage_of(source, connect(Layout.parse(layout), device="cpu"))
    initialise(stage, 0)
    try:
        save_model(stage, target)
    except ModelError as error:
        return str(error)
    return "saved"
