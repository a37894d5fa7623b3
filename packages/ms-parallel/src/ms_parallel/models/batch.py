"""Batches: inputs of a model and its loss, with images, video and audio for multimodal models."""

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from ms_parallel.errors import ConfigError

Batch = Mapping[str, Tensor]
"""`tokens` (B, S) int64; optionally `targets` (already shifted, -100 for no loss), `weights`,
`positions`, `documents` and other inputs of the loss, all with B rows; to replay the choices of
routers, `routed_experts` (see `replay_experts`); for multimodal models also the keys of `MEDIA` and
`POSITIONS`, in the format of `ms_data.InstructionStream`."""

IGNORED = -100
"""Target value that contributes no loss."""

POSITIONS = "positions_thw"
"""Positions of a vision-language model, (3, B, S) in time, height and width."""


@frozen(kw_only=True)
class MediaKeys:
    """Batch keys of one kind of media, whose n items are sorted by row and token."""

    places: str
    """Row, first token and end token of each item, (n, 3)."""
    items: tuple[str, ...]
    """Tensors with one entry per item, (n, ...)."""
    patches: str | None = None
    """Patches of all items, concatenated: (patches, values). The first key of `items` then has each
    item's grid of patches in time, height and width, (n, 3)."""

    @property
    def names(self) -> tuple[str, ...]:
        """All keys."""
        return (self.places, *self.items, *((self.patches,) if self.patches else ()))


MEDIA = {
    "image": MediaKeys(places="image_places", items=("image_grid_thw",), patches="pixel_values"),
    "video": MediaKeys(
        places="video_places", items=("video_grid_thw",), patches="pixel_values_videos"
    ),
    "audio": MediaKeys(places="audio_places", items=("input_features", "feature_attention_mask")),
}
"""Batch keys by kind of media. Audio has spectrograms (n, mels, frames) and a mask of the frames
with sound (n, frames)."""

MEDIA_NAMES = frozenset({POSITIONS, *(name for keys in MEDIA.values() for name in keys.names)})


def media_of(batch: Batch) -> Batch | None:
    """Media inputs of a batch; None for a text-only batch."""
    media = {name: value for name, value in batch.items() if name in MEDIA_NAMES}
    return media or None


def slice_rows(batch: Batch, start: int, stop: int) -> Batch:
    """Select rows [start, stop) and their media."""
    rows = {name: value[start:stop] for name, value in batch.items() if name not in MEDIA_NAMES}
    if POSITIONS in batch:
        # (3, B, S): rows are dim 1.
        rows[POSITIONS] = batch[POSITIONS][:, start:stop]
    for keys in MEDIA.values():
        if keys.places not in batch:
            continue
        spans = batch[keys.places]
        selected = (spans[:, 0] >= start) & (spans[:, 0] < stop)  # (n,)
        # Row indices restart at 0 in the slice.
        rows[keys.places] = spans[selected] - spans.new_tensor([start, 0, 0])
        rows |= {name: batch[name][selected] for name in keys.items}
        if keys.patches is not None:
            counts = batch[keys.items[0]].prod(1)  # (n,) patches per item
            rows[keys.patches] = batch[keys.patches][torch.repeat_interleave(selected, counts)]
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
