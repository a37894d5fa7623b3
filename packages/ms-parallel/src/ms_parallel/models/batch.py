"""A batch of text, what a model and its loss are given; and pictures, where the model sees."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ms_parallel.errors import ConfigError

Batch = Mapping[str, Tensor]
"""`tokens` (B, S) int64; by choice `targets` (already shifted, -100 where no loss), `weights`,
`positions`, `documents`, and whatever a loss reads, each with B rows; and, for a model that sees,
the members that `PICTURES` names."""

IGNORED = -100
"""A target where there is no loss."""

PATCHES, GRIDS, PLACES = "pixel_values", "image_grid_thw", "image_places"
POSITIONS = "positions_thw"

PICTURES = (PATCHES, GRIDS, PLACES, POSITIONS)
"""Patches of all pictures (n, numbers a patch); patches of each in time, down and across (p, 3);
row, first token and one past the last of each (p, 3); positions (3, B, S) in time, down and across.
Pictures stand in the order of their places."""


def pictures_of(batch: Batch) -> Batch | None:
    """Return what a batch holds for a model that sees; None where it holds nothing of the kind."""
    found = {name: batch[name] for name in PICTURES if name in batch}
    return found or None


def cut_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Cut the rows from `start` to `stop`, and the pictures that stand in them."""
    rows = {name: value[start:stop] for name, value in batch.items() if name not in PICTURES}
    if POSITIONS in batch:
        rows[POSITIONS] = batch[POSITIONS][:, start:stop]
    if PLACES not in batch:
        return rows
    places, grids = batch[PLACES], batch[GRIDS]
    inside = (places[:, 0] >= start) & (places[:, 0] < stop)
    of_patches = torch.repeat_interleave(inside, grids.prod(1))
    rows[PATCHES], rows[GRIDS] = batch[PATCHES][of_patches], grids[inside]
    rows[PLACES] = places[inside] - places.new_tensor([start, 0, 0])
    return rows


def check_tokens(batch: Batch, vocabulary: int) -> None:
    """Check that a vocabulary holds the tokens and targets of a batch.

    An embedding would follow another number out of its weight, or torch would stop the device.
    Tensors of an accelerator are not looked at, as that would wait for it.

    Raises:
        ConfigError: it does not; says which row has what.
    """
    for name, ignored in (("tokens", None), ("targets", IGNORED)):
        numbers = batch.get(name)
        if type(numbers) is not Tensor or numbers.device.type != "cpu" or not numbers.numel():
            continue
        if numbers.is_floating_point() or (
            numbers.amin() >= 0 and numbers.amax() < vocabulary  # the whole check, nearly always
        ):
            continue
        foreign = (numbers < 0) | (numbers >= vocabulary)
        if ignored is not None:
            foreign &= numbers != ignored
        for place in foreign.nonzero()[:1].tolist():
            raise ConfigError(
                f"row {place[0]} of {name} has {int(numbers[tuple(place)])}, and the model has a "
                f"vocabulary of {vocabulary}; take the model's own tokenizer"
            )
