"""Small weights that are trained beside a model's own, and where they can be."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError


class Adapters(Protocol):
    """Small weights that are trained beside a model's own."""

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter, so that the model is as it was before while the block runs."""

    def save_pretrained(self, folder: Path, /) -> None:
        """Write them; every process calls it."""


def check_adaptable(layout: Layout, placement: Sequence[int]) -> None:
    """Check that adapters can be put into the stages of a layout.

    Args:
        layout: how the model is split.
        placement: pipeline rank of each stage.

    Raises:
        ConfigError: the layout splits matrices, sequences or experts, or a rank has several stages.
    """
    several = len(set(placement)) < len(placement)
    if max(layout.tensor, layout.context, layout.expert) > 1 or several:
        raise ConfigError(
            "adapters support only the data and pipeline axes, with one stage per rank; set"
            " tensor, context and expert to 1 in the layout, and use a schedule such as 1f1b"
        )
