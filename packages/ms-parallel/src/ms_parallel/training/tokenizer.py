"""Reads the tokenizer of a run and sets the model's special token ids to match."""

import os
from pathlib import Path
from typing import Any

from attrs import evolve

from ms_parallel.files.tokenizer_source import TOKENIZER
from ms_parallel.models.registry import with_tokens
from ms_parallel.models.tokenizer_files import TokenizerFiles, read_tokenizer


def run_tokenizer(shards: Path, folder: Path | None) -> TokenizerFiles:
    """Read the tokenizer of a run's shards.

    If the model folder has the same tokenizer, its further files (such as a chat template) are read
    too.

    Args:
        shards: dataset; defines the token that ends a document.
        folder: folder of the initial model; None without one.

    Raises:
        ModelError: a tokenizer file is missing or damaged.
    """
    tokenizer = read_tokenizer(shards)
    if not _same_tokenizer(folder, tokenizer):
        return tokenizer
    assert folder is not None
    return read_tokenizer(folder, end_of_text=next(iter(tokenizer.end_token_ids), None))


def with_ends(config: Any, shards: Path, folder: Path | None) -> Any:
    """Set the begin, end and padding tokens of a model's configuration to match its shards.

    If the model folder has the same tokenizer, its end tokens are kept in addition; those of a
    different tokenizer are dropped.

    Raises:
        ModelError: as for `run_tokenizer`.
    """
    tokenizer = run_tokenizer(shards, folder)
    if not _same_tokenizer(folder, tokenizer):
        without_ends = evolve(config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        return with_tokens(without_ends, tokenizer)
    ends = config.eos_token_id
    of_folder = (ends,) if isinstance(ends, int) else ends or ()
    ids = tuple(dict.fromkeys((*tokenizer.end_token_ids, *of_folder)))
    eos_token_id = ids[0] if len(ids) == 1 else ids or None
    return with_tokens(evolve(config, eos_token_id=eos_token_id), tokenizer)


def _same_tokenizer(folder: Path | None, tokenizer: TokenizerFiles) -> bool:
    """Whether the model folder has the same tokenizer."""
    if folder is None or not os.path.isfile(folder / TOKENIZER):
        return False
    return (folder / TOKENIZER).read_bytes() == tokenizer.files[TOKENIZER]
