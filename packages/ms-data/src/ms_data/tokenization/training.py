"""Trains a byte-level BPE tokenizer on a corpus."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.errors import CorpusError, OutputError, SettingError
from ms_data.files.durable import write_file
from ms_data.files.untrusted import check_path, decoding
from ms_data.tokenization.tokenizer import END_OF_TEXT, Tokenizer
from ms_data.tokenization.tokenizer_limits import MOST_TOKENS

SMALLEST_VOCABULARY = 257
"""All bytes and the end of a text."""

LONGEST_WORD = 1000
"""Most characters without a word border that the trainer is given at a time."""
# Each run is looked at from its start alone, so that no text takes long to look through.
ENDLESS_WORD = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}|(?<!\s)\s{{{LONGEST_WORD},}}")


def train_tokenizer(
    corpus: CorpusName,
    *,
    vocab_size: int,
    out: str | Path | None = None,
    text_column: str = "text",
    skip_invalid: bool = False,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_leave_out: Callable[[str], None] = lambda kind: None,
) -> Tokenizer:
    """Learn a byte-level BPE from a corpus; any text can be encoded with it.

    Args:
        corpus: as for `build`.
        vocab_size: most tokens to learn, the 256 bytes and the end of text included.
        out: where to write it: a file if it ends in .json, else a folder that
            `transformers.AutoTokenizer` opens too; None keeps it in memory.
        text_column: the member or column of a row that holds the text.
        skip_invalid: leave out what is not valid text.
        document_limit_mib: a document, once unpacked, of more than so many MiB is not valid.
        on_progress: called with the bytes of the corpus that are read, and all.
        on_leave_out: called for each file of a folder that is no text with what it is.

    Raises:
        SettingError: vocab_size has no room for the bytes, or shards have none for it.
        CorpusError: the corpus is missing, empty or malformed.
        OutputError: `out` cannot be written.
    """
    if not SMALLEST_VOCABULARY <= vocab_size <= MOST_TOKENS:
        raise SettingError(
            f"vocab_size is {vocab_size}; it must be {SMALLEST_VOCABULARY} or more, "
            f"which is every byte and the end of text, and {MOST_TOKENS} at most"
        )
    if out is not None:
        check_path("out", out, error=OutputError, written="file" if _is_file(out) else "folder")
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=skip_invalid,
        document_limit_mib=document_limit_mib,
        or_leave_out="; or leave out what is invalid with `ms-data tokenizer --skip-invalid`",
    )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(_texts(source, on_progress, on_leave_out), trainer)
    tokenizer = Tokenizer(model.to_str(pretty=True).encode())
    if out is None:
        return tokenizer
    if _is_file(out):
        write_file(Path(out), tokenizer.content)
    else:
        tokenizer.save(out)
    return tokenizer


def _is_file(out: str | Path) -> bool:
    """Return whether a file is meant: by its name, or because one stands there."""
    with decoding(out, error=OutputError):
        stands = os.path.exists(out) and not os.path.isdir(out)
    return Path(out).suffix == ".json" or stands


def _without_endless_words(text: str) -> Iterator[str]:
    """Cut a text inside whatever would be one word of a thousand characters or more.

    The trainer's time grows with the square of a word's length, and such a word teaches nothing.
    """
    begin = 0
    for run in ENDLESS_WORD.finditer(text):
        for end in range(run.start() + LONGEST_WORD, run.end(), LONGEST_WORD):
            yield text[begin:end]
            begin = end
    yield text[begin:]


def _texts(
    source: Corpus,
    on_progress: Callable[[int, int], None],
    on_leave_out: Callable[[str], None],
) -> Iterator[str]:
    document = None
    for document in source.documents(on_leave_out=on_leave_out):
        on_progress(document.read_bytes, source.size_bytes)
        yield from _without_endless_words(document.text)
    if document is None:
        raise CorpusError(
            f"{source.name} is empty: no text in {len(source.files)} files; "
            "give a corpus that holds text"
        )
