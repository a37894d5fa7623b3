"""Streams unpaired preferences for training: one labeled response per row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.samples import Sample, Samples, UnpairedSample
from ms_data.disk.split import dataset_folder
from ms_data.errors import SettingError
from ms_data.settings.arguments import check_flags
from ms_data.streams.batch import RowPart, WeightedBatch, fill_rows
from ms_data.streams.draws import DrawSequence
from ms_data.streams.preferences import WIDTH_STEP
from ms_data.streams.share import BatchStream, StreamPlace, read_count


class UnpairedBatch(WeightedBatch, total=False):
    """A batch of labeled responses, one per row.

    With `mismatched=True`, row i of the columns `kl_tokens`, `kl_targets`, `kl_positions` and
    `kl_documents` is the prompt of row i, followed by the completion of the row before it in the
    global batch (of the last row for the first).
    """

    label: NDArray[np.float32]
    """Shape (b,): 1 for a desirable response, 0 for an undesirable one."""
    kl_tokens: NDArray[np.int64]
    kl_targets: NDArray[np.int64]
    kl_positions: NDArray[np.int64]
    kl_documents: NDArray[np.int32]


class UnpairedStream(BatchStream[UnpairedBatch]):
    """Global batches of labeled responses, from which every process receives its rows.

    A dataset of preference pairs is unpaired: each chosen response is desirable, each rejected one
    undesirable. Responses without a target within `sequence_length` tokens are dropped and counted
    in `left_out`; other responses that are longer are truncated and counted in `cut_off`.

    Args:
        folder: output folder of `build(..., chat=..., unpaired=True)` or `pairs=True`.
        sequence_length: maximum tokens per row.
        batch_size: rows per global batch.
        mismatched: add the columns of mismatched responses; see `UnpairedBatch`.
        seed: random seed of the order.
        place: object with `rank` and `count`; see `TokenStream`.
        split: `train` or `held_out`.
        shuffle: False keeps the order of the corpus; of pairs, all chosen responses come first.
        epochs: stop after this number of passes; the last batch is padded with rows without
            targets. None: never stop.

    Raises:
        SettingError: an argument is out of range, the folder holds other data, or no response
            fits.
        DamageError: data on disk is damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        sequence_length: int,
        batch_size: int,
        mismatched: bool = True,
        seed: int = 0,
        place: StreamPlace | None = None,
        split: str = "train",
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        check_flags(mismatched=mismatched)
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            place=place,
            split=split,
            shuffle=shuffle,
            epochs=epochs,
        )
        if self.sequence_length < 2:
            raise SettingError(f"sequence_length must be 2 or more, got {sequence_length}")
        self.samples = Samples(folder, split)
        if self.samples.kind not in ("preferences", "unpaired"):
            raise SettingError(
                f"{folder} holds {self.samples.kind} instead of preferences; build it with "
                "unpaired=True or pairs=True"
            )
        self.folders = (dataset_folder(folder),)
        """The dataset folder, which contains the tokenizer."""
        self.mismatched = mismatched
        self.cut_off = 0
        """Responses per epoch that are truncated."""
        count = len(self.samples) * (2 if self.samples.kind == "preferences" else 1)
        self._usable = [number for number in range(count) if self._fits(number)]
        self.left_out = count - len(self._usable)
        """Responses per epoch that are dropped because they have no target in this length."""
        if not self._usable:
            raise SettingError(
                f"{folder}: no response of split {split!r} has targets within {sequence_length} "
                "tokens; raise sequence_length"
            )
        self._draws = DrawSequence(len(self._usable), seed=self._settings["seed"], shuffle=shuffle)
        self._last = None if epochs is None else epochs * len(self._usable)
        self._drawn = 0
        self._identify_by_fingerprint()

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the content of the data."""
        return self.samples.dataset_index.fingerprint

    @property
    def responses_per_epoch(self) -> int:
        """Responses delivered per epoch."""
        return len(self._usable)

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size; all tokens are below it."""
        return self.samples.dataset_index.vocabulary_size

    def __next__(self) -> UnpairedBatch:
        remaining = self.batch_size if self._last is None else self._last - self._drawn
        if remaining <= 0:
            raise StopIteration
        draws = range(self._drawn, self._drawn + min(remaining, self.batch_size))
        samples = [self._sample(self._usable[self._draws[draw]]) for draw in draws]
        responses = [sample.response for sample in samples]
        # (x_1, y_n), (x_2, y_1), ..., (x_n, y_{n-1}) estimate the KL, as in TRL.
        rotated = [responses[-1], *responses[:-1]]
        mismatched = [
            _with_completion(response, other)
            for response, other in zip(responses, rotated, strict=True)
        ]
        rows = responses + mismatched if self.mismatched else responses
        # All ranks see the same responses here, so all use the same width.
        longest = max(len(row.tokens) for row in rows)
        width = min(self.sequence_length, -(-longest // WIDTH_STEP) * WIDTH_STEP)
        label = np.zeros(self._rank_rows.rows, np.float32)
        local_labels = self._rank_rows.of([sample.label for sample in samples])
        label[: len(local_labels)] = local_labels
        rows_of_rank = self._rows(responses, width)
        batch = UnpairedBatch(label=label, **rows_of_rank)  # type: ignore[typeddict-item]
        if self.mismatched:
            other = self._rows(mismatched, width)
            batch["kl_tokens"], batch["kl_targets"] = other["tokens"], other["targets"]
            batch["kl_positions"] = other["positions"]
            batch["kl_documents"] = other["documents"]
        self._drawn += len(samples)
        return batch

    def _rows(self, samples: list[Sample], width: int) -> WeightedBatch:
        """Fill this process's rows of a global batch."""
        parts = [
            [RowPart.of(sample, 0, width, sample.weight)] for sample in self._rank_rows.of(samples)
        ]
        end_of_text = self.samples.dataset_index.end_of_text
        return fill_rows(parts, count=self._rank_rows.rows, width=width, end_of_text=end_of_text)

    def _sample(self, number: int) -> UnpairedSample:
        """Return a response; of pairs, the chosen ones come before the rejected ones."""
        if self.samples.kind == "unpaired":
            return self.samples.unpaired(number)
        index = number % len(self.samples)
        pair, is_chosen = self.samples.pair(index), number == index
        response = pair.chosen if is_chosen else pair.rejected
        return UnpairedSample(response._replace(weight=pair.weight), is_chosen)

    def _position(self) -> dict[str, Any]:
        return {"consumed_responses": self._drawn}

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        self._drawn = read_count(position["consumed_responses"])

    def _fits(self, number: int) -> bool:
        """Return whether a response has targets within a row; count it if truncated."""
        # Both responses of a pair together are no shorter than either; this reads nothing.
        if int(self.samples.sizes[number % len(self.samples)]) <= self.sequence_length:
            return True
        # A row of S tokens has S targets, so it uses S + 1 tokens of a sample.
        stop = self.sequence_length + 1
        response = self._sample(number).response
        fits = bool(response.loss_mask[1:stop].any())
        self.cut_off += fits and len(response.tokens) > stop
        return fits


def _with_completion(response: Sample, other: Sample) -> Sample:
    """Return the prompt of a response with the completion of another one."""
    prompt, start = int(response.loss_mask.argmax()), int(other.loss_mask.argmax())
    return Sample(
        np.concatenate((response.tokens[:prompt], other.tokens[start:])),
        np.concatenate((response.loss_mask[:prompt], other.loss_mask[start:])),
    )
