"""Draws one set of conversations in its order, and packs it into rows of its own."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ms_data.disk.media import PlacedItem
from ms_data.disk.samples import Samples
from ms_data.errors import SettingError
from ms_data.streams.batch import RowPart
from ms_data.streams.draws import Draws
from ms_data.streams.packer import OpenRow, Packer, Row, Segment, cut_sample
from ms_data.streams.share import count

Long = Literal["truncate", "split"]
Weighting = Literal["token", "sample"]
_COUNTERS = ("drawn", "truncated", "split", "without_targets")


class PackedSource:
    """Draws samples and packs them.

    Args:
        samples: conversations.
        draws: their order.
        packer: places them in rows.
        length: tokens in a row.
        long: what becomes of a sample longer than a row: its beginning is kept, or all its parts.

    Raises:
        SettingError: no sample has a target within `length` tokens.
        DamageError: bytes are not those that were written.
    """

    def __init__(
        self, samples: Samples, draws: Draws, packer: Packer, *, length: int, long: Long
    ) -> None:
        self.samples = samples
        self.counters = dict.fromkeys(_COUNTERS, 0)
        """Samples drawn so far in all epochs, samples cut off and samples cut in parts, and
        segments left out because they hold no target."""
        if samples.kind == "media" and long != "truncate":
            raise SettingError(
                f"{samples.folder}: long is {long!r}, which could cut a picture or sound in parts; "
                "take 'truncate', which leaves out those that do not fit"
            )
        self._draws, self._packer = draws, packer
        self._length, self._long = length, long
        if not any(self._segments(one)[0] for one in range(len(samples))):
            raise SettingError(
                f"{samples.folder}: no sample of split {samples.split!r} has anything to learn "
                f"within {length} tokens; raise sequence_length, or look at the data"
            )

    def draw(self) -> list[Row]:
        """Draw one sample; return the rows that it fills."""
        number = self._draws[self.counters["drawn"]]
        self.counters["drawn"] += 1
        segments, without_targets = self._segments(number)
        self.counters["without_targets"] += without_targets
        if self.samples.sizes[number] > self._length:
            self.counters["split" if self._long == "split" else "truncated"] += 1
        return [row for segment in segments for row in self._packer.add(segment)]

    def flush(self) -> list[Row]:
        """Close the rows that are not full, and return them."""
        return self._packer.flush()

    def _segments(self, number: int) -> tuple[list[Segment], int]:
        """Find the segments of a sample that hold a target, and count those that do not."""
        size = int(self.samples.sizes[number])
        segments = cut_sample(number, size, self._length, split=self._long == "split")
        if size > self._length and self.samples.kind == "media":
            segments = [self._between_media(segments[0])]
        if 1 < size <= self._length:
            return segments, 0
        mask = self.samples.conversation(number).loss_mask
        kept = [one for one in segments if mask[one.start + 1 : one.stop + 1].any()]
        return kept, len(segments) - len(kept)

    def _between_media(self, segment: Segment) -> Segment:
        """End a segment before the first picture or sound that does not fit it whole."""
        cut = [one for one in self.samples.media(segment.sample) if one.stop > segment.stop]
        stop = min([segment.stop, *(one.start for one in cut)])
        return segment._replace(stop=max(1, stop))

    def media(self, segment: Segment) -> list[PlacedItem]:
        """Read the pictures and sounds in a segment, placed from its first token on."""
        found = self.samples.media(segment.sample)
        return [one for one in found if one.stop <= segment.stop]

    def read(self, segment: Segment, weighting: Weighting) -> RowPart:
        """Read a segment as a part of a row.

        Args:
            segment: which tokens.
            weighting: `sample` divides the weight among all targets of the sample, if it is cut
                in parts, or among those that are left, if it is cut off.
        """
        sample = self.samples.conversation(segment.sample)
        shared = 1
        if weighting == "sample":
            stop = None if self._long == "split" else segment.stop + 1
            shared = max(1, int(np.count_nonzero(sample.loss_mask[1:stop])))
        return RowPart.of(sample, segment.start, segment.stop, sample.weight / shared)

    def state(self) -> dict[str, Any]:
        """Return the JSON values that `restore` takes."""
        rows = [[row.number, [list(one) for one in row.segments]] for row in self._packer.open_rows]
        return {**self.counters, "opened": self._packer.opened, "open": rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken.

        Raises:
            ValueError: it cannot be this source's.
        """
        rows = [
            OpenRow(count(number), tuple(self.segment(one) for one in segments))
            for number, segments in state["open"]
        ]
        self._packer.restore(rows, count(state["opened"]))
        self.counters = {name: count(state[name]) for name in _COUNTERS}

    def segment(self, values: Any) -> Segment:
        """Make a segment from its JSON values.

        Raises:
            ValueError: there is no such segment.
        """
        segment = Segment(*(count(one) for one in values))
        known = segment.sample < len(self.samples)
        if not known or not segment.start < segment.stop <= self.samples.sizes[segment.sample]:
            raise ValueError(f"{segment} is no segment of a sample here")
        return segment
