"""Adapters (such as LoRA) trained on top of a model, and the layouts that support them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError


class Adapters(Protocol):
    """Trainable adapter weights added to a model."""

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the block, so that the base model runs."""

    def save_pretrained(self, folder: Path, /) -> None:
        """Write the adapter weights to a folder; every process must call it."""


def check_adaptable(layout: Layout, placement: Sequence[int]) -> None:
    """Check that a layout supports adapters.

    Args:
        layout: how the model is split.
        placement: pipeline rank of each stage.

    Raises:
        ConfigError: the layout splits matrices, sequences or experts, or a rank has several stages.
    """
    has_multiple_stages = len(set(placement)) < len(placement)
    if max(layout.tensor, layout.context, layout.expert) > 1 or has_multiple_stages:
        raise ConfigError(
            "adapters support only the data and pipeline axes, with one stage per rank; set"
            " tensor, context and expert to 1 in the layout, and use a schedule such as 1f1b"
        )
