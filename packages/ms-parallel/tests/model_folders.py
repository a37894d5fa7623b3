"""Runs of `test_huggingface.py`: load, initialize and save model folders under a layout."""

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
    """This process's stage of the model in a folder, with unset weights."""
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
    """Unshard the weights in bfloat16, as a forward pass may leave them."""
    assert isinstance(stage, FSDPModule)
    stage.unshard()


def load_and_save_all(
    layout: str, copies: dict[str, str], fresh: dict[str, str], seed: int, no_folder: str
) -> dict[str, Any]:
    """Run all checks of one layout in one set of processes.

    Args:
        layout: Layout of the processes.
        copies: Folders to load, mapped to the folders to save them to.
        fresh: Folders with the configs of models to initialize, mapped to the folders to save to.
        seed: Seed of the initialization.
        no_folder: Path where no folder can be created.

    Returns:
        The number of local elements of each copy, and the error of saving to `no_folder`.
    """
    groups = connect(Layout.parse(layout), device="cpu")
    sizes = []
    for source, target in copies.items():
        stage = stage_of(source, groups)
        gather(stage)
        load_weights(stage, source)
        gather(stage)
        save_model(stage, target, file_size_bytes=40_000)
        with torch.no_grad():
            sizes.append(sum(part_of(parameter).local.numel() for parameter in stage.parameters()))
    for source, target in fresh.items():
        stage = stage_of(source, groups)
        initialize(stage, seed)
        save_model(stage, target)
    error = "none"
    try:
        save_model(stage, no_folder)
    except ModelError as raised:
        error = str(raised)
    return {"sizes": sizes, "error": error}
