"""Finds the tokenizer of a run, and gives the model the ids that end its texts."""

import os
from pathlib import Path
from typing import Any

from attrs import evolve

from ms_parallel.files.tokenizer_source import TOKENIZER
from ms_parallel.models.registry import with_tokens
from ms_parallel.models.tokenizer_files import TokenizerFiles, read_tokenizer


def run_tokenizer(shards: Path, folder: Path | None) -> TokenizerFiles:
    """Read the tokenizer of a run's shards.

    Where the model's folder has the very same, all that the folder says of it is read too.

    Args:
        shards: say which token ends a document.
        folder: that the model is begun from; None where it is fresh.

    Raises:
        ModelError: a file of it is missing or damaged.
    """
    own = read_tokenizer(shards)
    if not _is_of(folder, own):
        return own
    assert folder is not None
    return read_tokenizer(folder, end_of_text=next(iter(own.end_token_ids), None))


def with_ends(config: Any, shards: Path, folder: Path | None) -> Any:
    """Give a model's configuration the tokens that begin, end and pad the texts of its shards.

    What a folder's configuration says of its own tokenizer stays, besides the shards' end; what it
    says of another one means nothing here.

    Raises:
        ModelError: as `run_tokenizer`.
    """
    tokenizer = run_tokenizer(shards, folder)
    if not _is_of(folder, tokenizer):
        plain = evolve(config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        return with_tokens(plain, tokenizer)
    ends = config.eos_token_id
    of_folder = (ends,) if isinstance(ends, int) else ends or ()
    ids = tuple(dict.fromkeys((*tokenizer.end_token_ids, *of_folder)))
    chosen = ids[0] if len(ids) == 1 else ids or None
    return with_tokens(evolve(config, eos_token_id=chosen), tokenizer)


def _is_of(folder: Path | None, tokenizer: TokenizerFiles) -> bool:
    """Return whether a tokenizer is the very one of a model's folder."""
    if folder is None or not os.path.isfile(folder / TOKENIZER):
        return False
    return (folder / TOKENIZER).read_bytes() == tokenizer.files[TOKENIZER]
