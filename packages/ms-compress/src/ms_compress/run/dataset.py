"""Read the rows of a run's dataset, and check them against its model."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from ms_compress.corpus import read_batch, read_tokens
from ms_compress.errors import ConfigError, DataError
from ms_compress.models.logits import IGNORED, check_tokens
from ms_compress.options import CompareRun, ModelRun, QatRun, SchemeRun
from ms_compress.text_ends import check_same_tokenizer


def check_tokenizers(options: ModelRun) -> None:
    """Check that dataset and teacher use the model's tokenizer, before anything is loaded.

    Raises:
        ConfigError: the token ids of two folders have different meanings.
        ExportError: a tokenizer.json is damaged.
    """
    explicit = options.tokenizer if isinstance(options, SchemeRun | CompareRun) else None
    model: dict[str, str | Path | None] = (
        {"tokenizer": explicit} if explicit else {"model": options.model}
    )
    # A dataset in a single file has token ids, or is rendered with the model's own tokenizer.
    if options.dataset is not None and options.dataset.is_dir():
        remedy = "build the dataset with the model's tokenizer"
        check_same_tokenizer({**model, "dataset": options.dataset}, remedy=remedy)
    if isinstance(options, QatRun):
        remedy = "use a teacher with the model's tokenizer"
        check_same_tokenizer({**model, "teacher": options.teacher}, remedy=remedy)


def training_rows(options: ModelRun, model: nn.Module) -> dict[str, Tensor]:
    """Read rows of the run's dataset for training: tokens, targets and perhaps weights.

    Raises:
        ConfigError: the run has no dataset.
        DataError: there is too little data, or a token is outside the model's vocabulary.
    """
    length = options.tuning.sequence_length
    batch = read_batch(_dataset(options), count=options.rows, length=length, chat=options.model)
    targets = batch["targets"]  # the last target of a row is not among its tokens
    used_tokens = torch.cat([batch["tokens"].flatten(), targets[targets != IGNORED]])
    check_tokens(model, used_tokens, str(options.dataset))
    return batch


def calibration_batches(
    options: ModelRun, model: nn.Module, *, limit: int | None = None
) -> Sequence[Tensor]:
    """Read batches of the run's dataset for calibration, (B, S) int64 each.

    Args:
        options: settings of the run.
        model: model whose vocabulary the tokens must be in.
        limit: maximum number of rows. None: the run's rows.

    Raises:
        ConfigError, DataError: as in `training_rows`.
    """
    count = options.rows if limit is None else min(options.rows, limit)
    length = options.tuning.sequence_length + 1
    tokens = read_tokens(_dataset(options), count=count, length=length, chat=options.model)
    check_tokens(model, tokens, str(options.dataset))
    return torch.split(tokens, options.tuning.batch_size)


def quality_rows(options: ModelRun, limit: int) -> tuple[Tensor, str]:
    """Read at most `limit` evaluation rows, (R, S) int64, and describe their source.

    The rows come from the split `held_out`. Without this split, they are the rows after the
    calibration rows; in a smaller dataset, the last calibration rows.

    Raises:
        ConfigError, DataError: as in `training_rows`.
    """
    dataset = _dataset(options)
    length = options.tuning.sequence_length + 1
    if dataset.is_dir():
        with suppress(DataError):
            rows = read_tokens(dataset, count=limit, length=length, split="held_out", fewer=True)
            return rows, f"the held-out split of {dataset}"
    count = options.rows + limit
    rows = read_tokens(dataset, count=count, length=length, chat=options.model, fewer=True)
    if len(rows) > options.rows:
        return rows[options.rows :], f"{dataset}, after the calibration rows"
    return rows[-limit:], str(dataset)


def _dataset(options: ModelRun) -> Path:
    if options.dataset is None:
        raise ConfigError(
            "dataset is missing; set it to a folder of shards, a text file, a file of"
            " conversations, or a JSON list of token lists"
        )
    return options.dataset
