"""Batches: inputs of a model and its loss, with images for vision models."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ms_parallel.errors import ConfigError

Batch = Mapping[str, Tensor]
"""`tokens` (B, S) int64; optionally `targets` (already shifted, -100 for no loss), `weights`,
`positions`, `documents` and other inputs of the loss, all with B rows; to replay the choices of
routers, `routed_experts` (see `replay_experts`); for vision models also the keys in `PICTURES`."""

IGNORED = -100
"""Target value that contributes no loss."""

PATCHES, GRIDS, PLACES = "pixel_values", "image_grid_thw", "image_places"
POSITIONS = "positions_thw"

PICTURES = (PATCHES, GRIDS, PLACES, POSITIONS)
"""Patches of all images (n, values per patch); patch grid of each image in time, height and width
(p, 3); row, first token and end token of each image (p, 3); positions (3, B, S) in time, height and
width. Images are sorted by row and token."""


def pictures_of(batch: Batch) -> Batch | None:
    """Image inputs of a batch; None for a text-only batch."""
    pictures = {name: batch[name] for name in PICTURES if name in batch}
    return pictures or None


def slice_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Select rows [start, stop) and their images."""
    rows = {name: value[start:stop] for name, value in batch.items() if name not in PICTURES}
    if POSITIONS in batch:
        # (3, B, S): rows are dim 1.
        rows[POSITIONS] = batch[POSITIONS][:, start:stop]
    if PLACES not in batch:
        return rows
    spans, grids = batch[PLACES], batch[GRIDS]
    image_mask = (spans[:, 0] >= start) & (spans[:, 0] < stop)
    patch_mask = torch.repeat_interleave(image_mask, grids.prod(1))  # images -> their patches
    rows[PATCHES], rows[GRIDS] = batch[PATCHES][patch_mask], grids[image_mask]
    # Row indices of images restart at 0 in the slice.
    rows[PLACES] = spans[image_mask] - spans.new_tensor([start, 0, 0])
    return rows


def check_tokens(batch: Batch, vocabulary: int) -> None:
    """Check that the tokens and targets of a batch are in the vocabulary.

    An out-of-range token would read past the embedding or trigger a device-side assert. Tensors on
    an accelerator are not checked: that would synchronize with it.

    Raises:
        ConfigError: a token or target is out of range; names the row and the value.
    """
    for name, ignored in (("tokens", None), ("targets", IGNORED)):
        numbers = batch.get(name)
        if type(numbers) is not Tensor or numbers.device.type != "cpu" or not numbers.numel():
            continue
        if numbers.is_floating_point() or (
            numbers.amin() >= 0 and numbers.amax() < vocabulary  # fast path
        ):
            continue
        invalid = (numbers < 0) | (numbers >= vocabulary)
        if ignored is not None:
            invalid &= numbers != ignored
        for index in invalid.nonzero()[:1].tolist():
            raise ConfigError(
                f"{name} must be below the vocabulary size of {vocabulary}, got"
                f" {int(numbers[tuple(index)])} in row {index[0]}; tokenize with the model's own"
                " tokenizer"
            )
