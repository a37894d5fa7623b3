"""Makes what a model reads of the pictures and sounds in packed rows, and says where they stand."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.media import PlacedItem
from ms_data.media.processor import MediaItem, Processor

Places = NDArray[np.int64]


class PictureBatch(TypedDict, total=False):
    """What a batch holds beside its tokens where a source has pictures; p of them."""

    pixel_values: NDArray[np.float32]
    """Shape (patches of all, numbers a patch), picture after picture."""
    image_grid_thw: NDArray[np.int64]
    """Shape (p, 3): patches of each in time, down and across."""
    image_places: Places
    """Shape (p, 3): its row, its first token and one past its last."""
    positions_thw: NDArray[np.int64]
    """Shape (3, b, S): positions of tokens in time, down and across, from 0 in each document."""


class SoundBatch(TypedDict, total=False):
    """What a batch holds beside its tokens where a source has sound; a of them."""

    input_features: NDArray[np.float32]
    """Shape (a, mels, frames): spectrograms."""
    feature_attention_mask: NDArray[np.int64]
    """Shape (a, frames): 1 where there is sound."""
    audio_places: Places
    """Shape (a, 3): its row, its first token and one past its last."""


class _Found(NamedTuple):
    """An item in a batch."""

    item: MediaItem
    place: tuple[int, int, int]


def media_batch(
    rows: Sequence[Sequence[tuple[int, Sequence[PlacedItem]]]],
    processor: Processor,
    positions: NDArray[np.int64],
) -> dict[str, Any]:
    """Make the members of a batch that pictures and sounds fill.

    Args:
        rows: of each row the parts, as how many tokens they have and what stands in them.
        processor: of the model.
        positions: shape (b, S), as without pictures.

    Raises:
        ValueError: a file is not what it was when the shards were built.
    """
    found = list(_found(rows))
    batch: dict[str, Any] = {}
    if processor.settings.pictures:
        pictures = [one for one in found if one.item.kind == "image"]
        merge = processor.settings.pictures.merge_size
        batch["pixel_values"] = processor.patches([one.item for one in pictures])
        grids = [one.item.grid for one in pictures]
        batch["image_grid_thw"] = np.array(grids, np.int64).reshape(-1, 3)
        batch["image_places"] = _places(pictures)
        batch["positions_thw"] = _positions(positions, pictures, merge)
    if processor.settings.sound:
        sounds = [one for one in found if one.item.kind == "audio"]
        features, mask = processor.spectrograms([one.item for one in sounds])
        batch |= {"input_features": features, "feature_attention_mask": mask}
        batch["audio_places"] = _places(sounds)
    return batch


def _found(rows: Sequence[Sequence[tuple[int, Sequence[PlacedItem]]]]) -> Iterator[_Found]:
    for at, row in enumerate(rows):
        done = 0
        for tokens, items in row:
            for placed in items:
                place = (at, done + placed.start, done + placed.stop)
                yield _Found(placed.item, place)
            done += tokens


def _places(found: Sequence[_Found]) -> Places:
    return np.array([one.place for one in found], np.int64).reshape(-1, 3)


def _positions(
    positions: NDArray[np.int64], pictures: Sequence[_Found], merge: int
) -> NDArray[np.int64]:
    """Compute the positions of tokens in time, down and across, shape (3, b, S).

    Those of text go up by one in all three; a picture has one position in time and a grid of
    them down and across; what follows it in its document goes on after the largest one
    (Qwen2-VL, section 2.1, multimodal rotary position embedding).
    """
    steps = np.tile(positions, (3, 1, 1))
    for item, (row, start, stop) in pictures:
        time, height, width = item.grid[0], item.grid[1] // merge, item.grid[2] // merge
        first = steps[:, row, start : start + 1].copy()
        steps[:, row, start:stop] = first + np.indices((time, height, width)).reshape(3, -1)
        rest = positions[row, stop:]
        # The document goes on until positions begin anew.
        ends = np.flatnonzero(rest == 0)
        end = stop + (int(ends[0]) if len(ends) else len(rest))
        steps[:, row, stop:end] += max(time, height, width) - (stop - start)
    return steps
