"""What each process does in the tests of model folders; see `test_huggingface.py`."""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ModelError
from ms_parallel.models import StagedModel, architecture, model_plan
from ms_parallel.split.part import part_of
from ms_parallel.split.stages import build_stage, cut_layers
from ms_parallel.weights import initialize, load_weights, save_model


def stage_of(source: str, groups: Groups) -> StagedModel:
    """This process's stage of the model of a folder, its weights not yet set."""
    config = architecture(source)
    layers = cut_layers(config.num_hidden_layers, groups.layout.pipeline, model_plan(config).cuts)
    return build_stage(
        config,
        layers[groups.place.pipeline],
        groups,
        mixed_precision=True,
        recompute="none",
        sharding="auto",
        ops=None,
    )


def gather(stage: StagedModel) -> None:
    """Leave the weights as a forward may leave them: whole, and in bfloat16."""
    assert isinstance(stage, FSDPModule)
    stage.unshard()


def everything(
    layout: str, copies: dict[str, str], fresh: dict[str, str], seed: int, no_folder: str
) -> dict[str, Any]:
    """All that the tests ask of one layout, in one start of the processes.

    Args:
        layout: Of the processes.
        copies: Folders to read by parts, to folders to write again.
        fresh: Folders whose configuration to build, to folders to write the fresh model to.
        seed: Of the fresh models.
        no_folder: A path where no folder can be made.

    Returns:
        How many numbers this process held of each copy, and the error of saving to `no_folder`.
    """
    groups = connect(Layout.parse(layout), device="cpu")
    held = []
    for source, target in copies.items():
        stage = stage_of(source, groups)
        gather(stage)
        load_weights(stage, source)
        gather(stage)
        save_model(stage, target, file_size_bytes=40_000)
        with torch.no_grad():
            held.append(sum(part_of(parameter).local.numel() for parameter in stage.parameters()))
    for source, target in fresh.items():
        stage = stage_of(source, groups)
        initialize(stage, seed)
        save_model(stage, target)
    error = "none"
    try:
        save_model(stage, no_folder)
    except ModelError as raised:
        error = str(raised)
    return {"held": held, "error": error}
