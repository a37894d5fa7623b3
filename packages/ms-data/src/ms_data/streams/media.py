"""Model inputs for the images, videos and audio in packed rows."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
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


class VideoBatch(TypedDict, total=False):
    """Additional batch keys of sources with video; `v` is the number of videos in the batch."""

    pixel_values_videos: NDArray[np.float32]
    """Shape (total patches, values per patch), video after video."""
    video_grid_thw: NDArray[np.int64]
    """Shape (v, 3): patches per video in time, height and width."""
    video_places: Spans
    """Shape (v, 3): row, first token, and one past the last token."""


class AudioBatch(TypedDict, total=False):
    """Additional batch keys of sources with audio; `a` is the number of clips in the batch."""

    input_features: NDArray[np.float32]
    """Shape (a, mels, frames): mel spectrograms."""
    feature_attention_mask: NDArray[np.int64]
    """Shape (a, frames): 1 for audio, 0 for padding."""
    audio_places: Spans
    """Shape (a, 3): row, first token, and one past the last token."""


class _BatchItem(NamedTuple):
    """An image, video or audio clip in a batch."""

    item: MediaItem
    span: tuple[int, int, int]
    """Row, first token, one past the last token."""
    time_step: Fraction = Fraction(1)
    """Time positions between two temporal patches."""


def media_batch(
    rows: Sequence[Sequence[tuple[int, Sequence[PlacedItem]]]],
    processor: Processor,
    positions: NDArray[np.int64],
) -> dict[str, Any]:
    """Compute the batch keys for images, videos and audio.

    Args:
        rows: for every row its parts, as (number of tokens, items).
        processor: the model's processor.
        positions: shape (b, S), token positions without media.

    Raises:
        ValueError: a media file changed since the shards were built.
    """
    items = list(_iterate_items(rows))
    images, videos, clips = (
        [entry for entry in items if entry.item.kind == kind]
        for kind in ("image", "video", "audio")
    )
    batch: dict[str, Any] = {}
    if pictures := processor.settings.pictures:
        batch["pixel_values"] = processor.patches([entry.item for entry in images])
        batch["image_grid_thw"], batch["image_places"] = _grid_array(images), _span_array(images)
    if settings := processor.settings.videos:
        patches, intervals_s = processor.videos([entry.item for entry in videos])
        batch["pixel_values_videos"] = patches
        batch["video_grid_thw"], batch["video_places"] = _grid_array(videos), _span_array(videos)
        if settings.positions_per_s is not None:
            videos = [
                entry._replace(time_step=_time_step(interval_s * settings.positions_per_s))
                for entry, interval_s in zip(videos, intervals_s.tolist(), strict=True)
            ]
    if pictures:
        seen = sorted([*images, *videos], key=_span)
        batch["positions_thw"] = _positions_thw(positions, seen, pictures.merge_size)
    if processor.settings.sound:
        features, mask = processor.spectrograms([entry.item for entry in clips])
        batch |= {"input_features": features, "feature_attention_mask": mask}
        batch["audio_places"] = _span_array(clips)
    return batch


def _time_step(positions: float) -> Fraction:
    """Round to millionths, so that products with integers have no rounding error."""
    return Fraction(round(positions * 1_000_000), 1_000_000)


def _span(item: _BatchItem) -> tuple[int, int, int]:
    return item.span


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


def _grid_array(items: Sequence[_BatchItem]) -> NDArray[np.int64]:
    return np.array([entry.item.grid for entry in items], np.int64).reshape(-1, 3)


def _positions_thw(
    positions: NDArray[np.int64], items: Sequence[_BatchItem], merge: int
) -> NDArray[np.int64]:
    """Compute multimodal rotary positions, shape (3, b, S).

    Text advances all three axes by 1. An image has one time position and a grid of height and width
    positions, a video one time position per temporal patch; the text after it continues from the
    largest of these (Qwen2-VL, section 2.1). transformers from 5.3 on continues from the largest
    height or width, so that text overlaps in time with a video of more time positions.

    Args:
        positions: shape (b, S), token positions without media.
        items: images and videos by row and token.
        merge: patches per side of a token.
    """
    positions_thw = np.tile(positions, (3, 1, 1))
    for item, (row, start, stop), time_step in items:
        # In tokens.
        time, height, width = item.grid[0], item.grid[1] // merge, item.grid[2] // merge
        first = positions_thw[:, row, start : start + 1].copy()  # (3, 1)
        grid = np.indices((time, height, width)).reshape(3, -1)  # (3, tokens)
        grid[0] = grid[0] * time_step.numerator // time_step.denominator
        positions_thw[:, row, start:stop] = first + grid
        after = positions[row, stop:]
        # The document ends where the next position is 0.
        ends = np.flatnonzero(after == 0)
        end = stop + (int(ends[0]) if len(ends) else len(after))
        # The item has stop - start tokens but spans fewer positions; shift the text after it.
        positions_thw[:, row, stop:end] += int(grid.max()) + 1 - (stop - start)
    return positions_thw
