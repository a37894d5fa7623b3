"""The tokenizer beside a model: its files, and the ids with which texts begin, end and are padded.

Readers of a model's folder stop at the `eos_token_id` that they find there. Where nobody writes it,
a trained model's text goes on to the limit, through one end of a document after another.
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

_USUAL: Mapping[str, tuple[str, ...]] = {
    "bos_token": ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[CLS]"),
    "eos_token": (*KNOWN_ENDS, "[SEP]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
}
"""Names that published tokenizers give to these tokens, most likely first."""


@frozen(kw_only=True)
class TokenizerFiles:
    """What goes beside a model's weights so that its folder reads and ends texts alone."""

    files: Mapping[str, bytes]
    """Content by name."""
    end_token_ids: tuple[int, ...]
    """Any of them ends a text; empty where the tokenizer has none that is known."""
    begin_token_id: int | None
    pad_token_id: int | None

    @property
    def eos_token_id(self) -> int | tuple[int, ...] | None:
        """The ids that end a text as config.json spells them."""
        return self.end_token_ids[0] if len(self.end_token_ids) == 1 else self.end_token_ids or None


def read_tokenizer(source: str | Path, *, end_of_text: int | None = None) -> TokenizerFiles:
    """Read the tokenizer of a folder of shards, of a model's folder, or a `tokenizer.json`.

    Args:
        source: the folder or file. What a `tokenizer_config.json` there says is kept.
        end_of_text: the id that ended each document in training, if it is known; a folder of
            shards says it itself.

    Raises:
        ModelError: a file is missing or damaged, or a special token is not in the vocabulary.
    """
    check_path("tokenizer", source, error=ModelError)
    found = read_source(source, error=ModelError)
    if end_of_text is None and os.path.isdir(source):
        end_of_text = end_of_documents(Path(source), error=ModelError)
    if not found.texts:
        raise ModelError(f"{found.path}: it holds no tokens; give a tokenizer.json")
    if end_of_text is not None and end_of_text not in found.texts:
        raise ModelError(
            f"{found.path}: has no token {end_of_text}, which ends the documents of its shards"
        )
    ids = {text: token for token, text in found.texts.items()}
    named = {}
    for role, usual in _USUAL.items():
        text = token_text(found.settings.get(role))
        if found.settings.get(role) is None:
            text = next((each for each in usual if each in ids), None)
        elif text not in ids:
            said = str(text)[:60]
            raise ModelError(f"{found.path}: has no token {said!r}, its {role}; mend {SETTINGS}")
        named[role] = None if text is None else ids[text]
    ends = dict.fromkeys(i for i in (end_of_text, named["eos_token"]) if i is not None)
    # A text begins where the one before ended, as documents lie in shards; pads are never read.
    first = next(iter(ends), None)
    begin, pad = (first if named[n] is None else named[n] for n in ("bos_token", "pad_token"))
    # Else readers take a space before punctuation for one that the tokenizer put there.
    found.settings.setdefault("clean_up_tokenization_spaces", False)
    return TokenizerFiles(
        files=found.files(dict(zip(ROLES, (begin, first, pad), strict=True))),
        end_token_ids=tuple(ends),
        begin_token_id=begin,
        pad_token_id=pad,
    )
