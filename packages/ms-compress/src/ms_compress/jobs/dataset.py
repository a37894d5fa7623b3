"""The rows of a run's dataset, checked against its model."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ms_compress.commands.options import ModelRun, QatRun, SchemeRun
from ms_compress.errors import ConfigError
from ms_compress.models.logits import check_tokens
from ms_compress.text_ends import check_same_tokenizer
from ms_compress.training.corpus import read_batch, read_tokens
from ms_compress.training.loop import IGNORED


def check_tokenizers(options: ModelRun) -> None:
    """Refuse a dataset or a teacher of another tokenizer, before anything is loaded.

    Raises:
        ConfigError: the token ids of two folders do not mean the same.
        ExportError: a tokenizer.json is damaged.
    """
    explicit = options.tokenizer if isinstance(options, SchemeRun) else None
    model: dict[str, str | Path | None] = (
        {"tokenizer": explicit} if explicit else {"model": options.model}
    )
    # A dataset that is one file is of token ids alone, or rendered by the model's own tokenizer.
    if options.dataset is not None and options.dataset.is_dir():
        remedy = "build the dataset with the model's tokenizer"
        check_same_tokenizer({**model, "dataset": options.dataset}, remedy=remedy)
    if isinstance(options, QatRun):
        remedy = "use a teacher of the model's tokenizer"
        check_same_tokenizer({**model, "teacher": options.teacher}, remedy=remedy)


def training_rows(options: ModelRun, model: nn.Module) -> dict[str, Tensor]:
    """Read rows of the run's dataset to train on: tokens, and the targets that count.

    Raises:
        ConfigError: none was given.
        DataError: there is too little of it, or the model's vocabulary does not hold it.
    """
    length = options.tuning.sequence_length
    found = read_batch(_dataset(options), count=options.rows, length=length, chat=options.model)
    targets = found["targets"]  # the last one of a row is no token of it
    both = torch.cat([found["tokens"].flatten(), targets[targets != IGNORED]])
    check_tokens(model, both, str(options.dataset))
    return found


def calibration_rows(options: ModelRun, model: nn.Module, *, most: int | None = None) -> Tensor:
    """Read rows of the run's dataset to calibrate on, (R, S) int64.

    Raises:
        ConfigError, DataError: as of `training_rows`.
    """
    count = options.rows if most is None else min(options.rows, most)
    length = options.tuning.sequence_length + 1
    found = read_tokens(_dataset(options), count=count, length=length, chat=options.model)
    check_tokens(model, found, str(options.dataset))
    return found


def _dataset(options: ModelRun) -> Path:
    if options.dataset is None:
        raise ConfigError(
            "dataset is missing; give a folder of shards, a file of conversations, or a JSON"
            " list of tokens"
        )
    return options.dataset
