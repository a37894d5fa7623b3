"""Model inputs for the images and audio in packed rows."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.media import PlacedItem
from ms_data.media.processor import MediaItem, Processor

Spans = NDArray[np.int64]


class ImageBatch(TypedDict, total=False):
    """Additional batch keys of sources with images; `p` is the number of images in the batch."""

    pixel_values: NDArray[np.float32]
    """Shape (total patches, values per patch), image after image."""
    image_grid_thw: NDArray[np.int64]
    """Shape (p, 3): patches per image in time, height and width."""
    image_places: Spans
    """Shape (p, 3): row, first token, and one past the last token."""
    positions_thw: NDArray[np.int64]
    """Shape (3, b, S): token positions in time, height and width, from 0 in each document."""


class AudioBatch(TypedDict, total=False):
    """Additional batch keys of sources with audio; `a` is the number of clips in the batch."""

    input_features: NDArray[np.float32]
    """Shape (a, mels, frames): mel spectrograms."""
    feature_attention_mask: NDArray[np.int64]
    """Shape (a, frames): 1 for audio, 0 for padding."""
    audio_places: Spans
    """Shape (a, 3): row, first token, and one past the last token."""


class _BatchItem(NamedTuple):
    """An image or audio clip in a batch."""

    item: MediaItem
    span: tuple[int, int, int]
    """Row, first token, one past the last token."""


def media_batch(
    rows: Sequence[Sequence[tuple[int, Sequence[PlacedItem]]]],
    processor: Processor,
    positions: NDArray[np.int64],
) -> dict[str, Any]:
    """Compute the batch keys for images and audio.

    Args:
        rows: for every row its parts, as (number of tokens, items).
        processor: the model's processor.
        positions: shape (b, S), token positions without images.

    Raises:
        ValueError: a media file changed since the shards were built.
    """
    items = list(_iterate_items(rows))
    batch: dict[str, Any] = {}
    if processor.settings.pictures:
        images = [entry for entry in items if entry.item.kind == "image"]
        merge = processor.settings.pictures.merge_size
        batch["pixel_values"] = processor.patches([entry.item for entry in images])
        grids = [entry.item.grid for entry in images]
        batch["image_grid_thw"] = np.array(grids, np.int64).reshape(-1, 3)  # (p, 3), also for p = 0
        batch["image_places"] = _span_array(images)
        batch["positions_thw"] = _positions_thw(positions, images, merge)
    if processor.settings.sound:
        clips = [entry for entry in items if entry.item.kind == "audio"]
        features, mask = processor.spectrograms([entry.item for entry in clips])
        batch |= {"input_features": features, "feature_attention_mask": mask}
        batch["audio_places"] = _span_array(clips)
    return batch


def _iterate_items(
    rows: Sequence[Sequence[tuple[int, Sequence[PlacedItem]]]],
) -> Iterator[_BatchItem]:
    for row_index, row in enumerate(rows):
        offset = 0  # of the part within its row
        for tokens, items in row:
            for placed in items:
                span = (row_index, offset + placed.start, offset + placed.stop)
                yield _BatchItem(placed.item, span)
            offset += tokens


def _span_array(items: Sequence[_BatchItem]) -> Spans:
    return np.array([item.span for item in items], np.int64).reshape(-1, 3)


def _positions_thw(
    positions: NDArray[np.int64], images: Sequence[_BatchItem], merge: int
) -> NDArray[np.int64]:
    """Compute multimodal rotary positions, shape (3, b, S).

    Text advances all three axes by 1. An image has one time position and a grid of height and width
    positions; the text after it continues from the largest of these (Qwen2-VL, section 2.1).
    """
    positions_thw = np.tile(positions, (3, 1, 1))
    for item, (row, start, stop) in images:
        # In tokens.
        time, height, width = item.grid[0], item.grid[1] // merge, item.grid[2] // merge
        first = positions_thw[:, row, start : start + 1].copy()  # (3, 1)
        positions_thw[:, row, start:stop] = first + np.indices((time, height, width)).reshape(3, -1)
        after = positions[row, stop:]
        # The document ends where the next position is 0.
        ends = np.flatnonzero(after == 0)
        end = stop + (int(ends[0]) if len(ends) else len(after))
        # The image has stop - start tokens but spans fewer positions; shift the text after it.
        positions_thw[:, row, stop:end] += max(time, height, width) - (stop - start)
    return positions_thw
