"""Tokenizer files of a model folder, and the ids of its begin, end and padding tokens.

Inference code stops at the `eos_token_id` of the model folder. Without it a trained model generates
up to the length limit, document after document.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from ms_parallel.errors import ModelError
from ms_parallel.files.tokenizer_source import (
    KNOWN_ENDS,
    ROLES,
    SETTINGS,
    end_of_documents,
    read_source,
    token_text,
)
from ms_parallel.files.untrusted import check_path

_COMMON_NAMES: Mapping[str, tuple[str, ...]] = {
    "bos_token": ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[CLS]"),
    "eos_token": (*KNOWN_ENDS, "[SEP]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
}
"""Common names of these tokens in published tokenizers, most likely first."""


@frozen(kw_only=True)
class TokenizerFiles:
    """Tokenizer files for a model folder, and the special tokens for its config.json."""

    files: Mapping[str, bytes]
    """File content by name."""
    end_token_ids: tuple[int, ...]
    """End-of-text tokens, any of which ends a text; empty if none is known."""
    begin_token_id: int | None
    pad_token_id: int | None

    @property
    def eos_token_id(self) -> int | tuple[int, ...] | None:
        """End-of-text ids in the format of config.json."""
        return self.end_token_ids[0] if len(self.end_token_ids) == 1 else self.end_token_ids or None


def read_tokenizer(source: str | Path, *, end_of_text: int | None = None) -> TokenizerFiles:
    """Read a tokenizer from a folder of shards, a model folder, or a `tokenizer.json`.

    Args:
        source: the folder or file; settings in its `tokenizer_config.json` are kept.
        end_of_text: token id that ended each training document; by default taken from the folder
            of shards.

    Raises:
        ModelError: a file is missing or damaged, or a special token is not in the vocabulary.
    """
    check_path("tokenizer", source, error=ModelError)
    tokenizer = read_source(source, error=ModelError)
    if end_of_text is None and os.path.isdir(source):
        end_of_text = end_of_documents(Path(source), error=ModelError)
    if not tokenizer.texts:
        raise ModelError(f"{tokenizer.path} has no tokens; use a complete tokenizer.json")
    if end_of_text is not None and end_of_text not in tokenizer.texts:
        raise ModelError(
            f"{tokenizer.path} has no token {end_of_text}, which ends the documents of its shards"
        )
    ids = {text: token for token, text in tokenizer.texts.items()}
    role_ids = {}
    for role, common_names in _COMMON_NAMES.items():
        text = token_text(tokenizer.settings.get(role))
        if tokenizer.settings.get(role) is None:
            text = next((name for name in common_names if name in ids), None)
        elif text not in ids:
            shown = str(text)[:60]
            raise ModelError(
                f"{tokenizer.path} has no token {shown!r}, which {SETTINGS} names as {role};"
                f" correct {SETTINGS}"
            )
        role_ids[role] = None if text is None else ids[text]
    ends = dict.fromkeys(i for i in (end_of_text, role_ids["eos_token"]) if i is not None)
    # In shards a document follows the previous one's end token, so that token also begins a text.
    # Padding is masked, so any token will do.
    first = next(iter(ends), None)
    begin, pad = (first if role_ids[n] is None else role_ids[n] for n in ("bos_token", "pad_token"))
    # The default, true, would remove spaces before punctuation in decoded text.
    tokenizer.settings.setdefault("clean_up_tokenization_spaces", False)
    return TokenizerFiles(
        files=tokenizer.files(dict(zip(ROLES, (begin, first, pad), strict=True))),
        end_token_ids=tuple(ends),
        begin_token_id=begin,
        pad_token_id=pad,
    )
