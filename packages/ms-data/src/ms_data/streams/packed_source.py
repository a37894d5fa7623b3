"""Draws the samples of one conversation dataset and packs them into rows."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ms_data.disk.media import PlacedItem
from ms_data.disk.samples import Samples
from ms_data.errors import SettingError
from ms_data.streams.batch import RowPart
from ms_data.streams.draws import DrawSequence
from ms_data.streams.packer import OpenRow, Packer, Row, Segment, cut_sample
from ms_data.streams.share import read_count

LongMode = Literal["truncate", "split"]
Weighting = Literal["token", "sample"]
_COUNTERS = ("drawn", "truncated", "split", "without_targets")


class PackedSource:
    """Draws samples and packs them.

    Args:
        samples: the conversations.
        draws: order of the samples.
        packer: assigns segments to rows.
        length: tokens per row.
        long: `truncate` keeps the beginning of a sample longer than a row, `split` all its parts.

    Raises:
        SettingError: no sample has a target within `length` tokens.
        DamageError: data on disk is damaged.
    """

    def __init__(
        self, samples: Samples, draws: DrawSequence, packer: Packer, *, length: int, long: LongMode
    ) -> None:
        self.samples = samples
        self.counters = dict.fromkeys(_COUNTERS, 0)
        """Counts over all epochs: samples drawn, truncated and split into parts, and segments
        dropped because they have no targets."""
        if samples.kind == "media" and long != "truncate":
            raise SettingError(
                f"{samples.folder}: long={long!r} could cut an image or audio clip into parts; "
                "use 'truncate', which drops items that do not fit"
            )
        self._draws, self._packer = draws, packer
        self._length, self._long = length, long
        # Otherwise drawing would never complete a row and never end.
        if not any(self._segments(number)[0] for number in range(len(samples))):
            raise SettingError(
                f"{samples.folder}: no sample of split {samples.split!r} has a target within "
                f"{length} tokens; raise sequence_length, or check the data"
            )

    def draw(self) -> list[Row]:
        """Draw one sample; return the rows that this completes."""
        number = self._draws[self.counters["drawn"]]
        self.counters["drawn"] += 1
        # Segments without targets would only waste space in a row.
        segments, without_targets = self._segments(number)
        self.counters["without_targets"] += without_targets
        if self.samples.sizes[number] > self._length:
            self.counters["split" if self._long == "split" else "truncated"] += 1
        return [row for segment in segments for row in self._packer.add(segment)]

    def flush(self) -> list[Row]:
        """Close the partly filled rows and return them."""
        return self._packer.flush()

    def _segments(self, number: int) -> tuple[list[Segment], int]:
        """Return the segments of a sample that have targets, and the number that have none."""
        size = int(self.samples.sizes[number])
        segments = cut_sample(number, size, self._length, split=self._long == "split")
        if size > self._length and self.samples.kind == "media":
            segments = [self._end_before_cut_media(segments[0])]
        if 1 < size <= self._length:
            return segments, 0
        # Reading the sample is only needed if it was cut, or has a single token.
        mask = self.samples.conversation(number).loss_mask
        with_targets = [
            # A target is the next token, so a segment's targets are one position later.
            segment
            for segment in segments
            if mask[segment.start + 1 : segment.stop + 1].any()
        ]
        return with_targets, len(segments) - len(with_targets)

    def _end_before_cut_media(self, segment: Segment) -> Segment:
        """End a segment before the first image or audio clip that does not fit completely."""
        cut_items = [
            item for item in self.samples.media(segment.sample) if item.stop > segment.stop
        ]
        # A partly included image could not be encoded.
        stop = min([segment.stop, *(item.start for item in cut_items)])
        return segment._replace(stop=max(1, stop))  # a segment has at least one token

    def media(self, segment: Segment) -> list[PlacedItem]:
        """Return the images and audio of a segment, with positions relative to its first token."""
        items = self.samples.media(segment.sample)
        return [item for item in items if item.stop <= segment.stop]

    def read(self, segment: Segment, weighting: Weighting) -> RowPart:
        """Read a segment as part of a row.

        Args:
            segment: the tokens to read.
            weighting: `sample` divides the sample's weight among its targets: all of them if the
                sample is split into parts, the remaining ones if it is truncated.
        """
        sample = self.samples.conversation(segment.sample)
        targets = 1
        if weighting == "sample":
            # The other parts of a split sample have the remaining targets.
            stop = None if self._long == "split" else segment.stop + 1
            targets = max(1, int(np.count_nonzero(sample.loss_mask[1:stop])))
        return RowPart.of(sample, segment.start, segment.stop, sample.weight / targets)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values, for `restore`."""
        rows = [
            [row.number, [list(segment) for segment in row.segments]]
            for row in self._packer.open_rows
        ]
        return {**self.counters, "opened": self._packer.opened, "open": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: the state does not fit this source.
        """
        rows = [
            OpenRow(read_count(number), tuple(self.segment(values) for values in segments))
            for number, segments in state["open"]
        ]
        self._packer.restore(rows, read_count(state["opened"]))
        self.counters = {name: read_count(state[name]) for name in _COUNTERS}

    def segment(self, values: Any) -> Segment:
        """Create a segment from its JSON values.

        Raises:
            ValueError: the segment does not exist.
        """
        segment = Segment(*(read_count(value) for value in values))
        exists = segment.sample < len(self.samples)
        if not exists or not segment.start < segment.stop <= self.samples.sizes[segment.sample]:
            raise ValueError(f"{segment} is not a segment of this source")
        return segment
