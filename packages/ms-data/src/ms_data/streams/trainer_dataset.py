"""`TrainerDataset`: packed rows of shards for transformers' Trainer or a DataLoader."""

import logging
import operator
import os
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from ms_data.arguments import check_type, shown
from ms_data.errors import SettingError
from ms_data.files.untrusted import check_path
from ms_data.settings.arguments import check_counts, is_integer
from ms_data.streams.batch import IGNORED
from ms_data.streams.token_source import CACHE_MIB, TokenSource

logger = logging.getLogger(__name__)

WINDOW_CHUNKS = 64
JUMPS_BEFORE_WARNING = 16
"""Number of backward jumps that indicates a random sampler."""


class TrainerRow(TypedDict):
    """One row of S tokens with the keys of transformers' causal models."""

    input_ids: NDArray[np.int64]
    """Shape (S,)."""
    labels: NDArray[np.int64]
    """Shape (S,): the tokens, unshifted; -100 for the first token of each document."""
    position_ids: NDArray[np.int64]
    """Shape (S,): restarts at 0 with each document, from which models derive the boundaries."""


class TrainerDataset:
    """Rows of packed documents, in the same order as `TokenStream`, for transformers' Trainer.

    A map-style dataset of torch: it has a length and items, and a new order after `set_epoch`,
    which Trainer and Accelerate call. Rows are shuffled here, window by window, so the sampler must
    be sequential (`TrainingArguments(train_sampling_strategy="sequential")`). A resumed Trainer
    skips batches without reading them, and continues with the same rows.

    Loss and attention stay within documents: models of transformers derive the attention mask from
    `position_ids` if they get no `attention_mask` and no cache, as under Trainer.

    Args:
        folder: output folder of `build`, with text.
        sequence_length: tokens per row, S.
        seed: random seed of the order.
        split: `train` or `held_out`.
        shuffle: False keeps the order on disk.
        cache_mib: size of the cache of decoded frames per process.

    Raises:
        SettingError: an argument is out of range, or the split is too short.
        DamageError: the index, or later a frame, is damaged.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        sequence_length: int,
        seed: int = 0,
        split: str = "train",
        shuffle: bool = True,
        cache_mib: int = CACHE_MIB,
    ) -> None:
        check_path("folder", folder, error=SettingError)
        check_counts(sequence_length=sequence_length)
        if not is_integer(seed):
            raise SettingError(f"seed must be an integer, got {shown(seed)}")
        self.folder = Path(folder)
        self.sequence_length = operator.index(sequence_length)
        check_type("shuffle", shuffle, bool, "True or False", error=SettingError)
        self.seed, self.split, self.shuffle = operator.index(seed), split, shuffle
        self.cache_mib = cache_mib
        self.epoch = 0
        # 0: no process has opened the files; no process has this id.
        self._process = 0
        self._next, self._jumps = 0, 0
        self._length = self._open().order.samples

    def __len__(self) -> int:
        """Rows per epoch."""
        return self._length

    def __getitem__(self, index: int) -> TrainerRow:
        """Read a row of the current epoch.

        Raises:
            IndexError: the index is out of range.
            DamageError: a frame is damaged.
        """
        number = operator.index(index)
        if not 0 <= number < self._length:
            raise IndexError(f"row {number} of {self._length}")
        self._count_jumps(number)
        # Positions continue over epochs, each of which has its own order.
        batch = self._open().read(self.epoch * self._length + number, 1)
        tokens, positions = batch["tokens"][0], batch["positions"][0]
        # Models shift labels themselves, so the target of token t - 1 is the label of token t.
        return TrainerRow(
            input_ids=tokens,
            labels=np.where(positions == 0, IGNORED, tokens),
            position_ids=positions,
        )

    def set_epoch(self, epoch: int) -> None:
        """Use the order of an epoch, counted from 0."""
        self.epoch = operator.index(epoch)

    def _open(self) -> TokenSource:
        # Workers of a DataLoader open their own files.
        if self._process != os.getpid():
            self._source = TokenSource(
                self.folder,
                self.split,
                length=self.sequence_length,
                seed=self.seed,
                shuffle=self.shuffle,
                chunk_samples=None,
                window_chunks=WINDOW_CHUNKS,
                cache_mib=self.cache_mib,
            )
            self._process = os.getpid()
        return self._source

    def _count_jumps(self, number: int) -> None:
        """Warn once about a random sampler: each jump decodes a window of many rows."""
        # Gaps forward are normal: data ranks and workers read every n-th row.
        self._jumps += number < self._next - 1
        self._next = number + 1
        if self._jumps == JUMPS_BEFORE_WARNING and self.shuffle:
            logger.warning(
                "rows are read in random order, so each read decodes a window; the dataset already"
                " shuffles rows, so set train_sampling_strategy='sequential' in TrainingArguments"
            )

    def __getstate__(self) -> dict[str, object]:
        """Return the settings and the epoch; the files are opened by each process."""
        state = dict(self.__dict__)
        state.pop("_source", None)
        return {**state, "_process": 0}
