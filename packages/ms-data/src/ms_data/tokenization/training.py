"""Trains a byte-level BPE tokenizer on a corpus."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from ms_data.arguments import check_callable, shown
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.errors import CorpusError, OutputError, SettingError
from ms_data.files.durable import write_file
from ms_data.files.untrusted import check_path, decoding
from ms_data.settings.arguments import is_integer
from ms_data.tokenization.tokenizer import END_OF_TEXT, Tokenizer
from ms_data.tokenization.tokenizer_limits import MAX_TOKENS

MIN_VOCABULARY = 257
"""256 bytes and the end-of-text token."""

MAX_WORD_LENGTH = 1000
"""Maximum characters passed to the trainer without a word boundary."""
# The lookbehinds match runs only from their start, so the search is linear in the text.
LONG_WORD = re.compile(rf"(?<!\S)\S{{{MAX_WORD_LENGTH},}}|(?<!\s)\s{{{MAX_WORD_LENGTH},}}")


def train_tokenizer(
    corpus: CorpusName,
    *,
    vocab_size: int,
    out: str | Path | None = None,
    text_column: str = "text",
    skip_invalid: bool = False,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_leave_out: Callable[[str], None] = lambda file_type: None,
) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which can encode any text.

    Args:
        corpus: see `build`.
        vocab_size: maximum vocabulary size, including the 256 bytes and the end-of-text token.
        out: output file if it ends in .json, otherwise a folder that `transformers.AutoTokenizer`
            can load. None: do not save.
        text_column: column or JSON key with the text of a row.
        skip_invalid: skip documents that are not valid text.
        document_limit_mib: a longer document (uncompressed) is invalid.
        on_progress: called with the corpus bytes read so far and the total.
        on_leave_out: called with the file type for every skipped file that is not text.

    Raises:
        SettingError: vocab_size is too small for the bytes, or too large for shards.
        CorpusError: the corpus is missing, empty or malformed.
        OutputError: `out` cannot be written.
    """
    check_callable("on_progress", on_progress, error=SettingError)
    check_callable("on_leave_out", on_leave_out, error=SettingError)
    if not is_integer(vocab_size) or not MIN_VOCABULARY <= vocab_size <= MAX_TOKENS:
        raise SettingError(
            f"vocab_size must be {MIN_VOCABULARY} (bytes and end of text) to {MAX_TOKENS}, "
            f"got {shown(vocab_size)}"
        )
    if out is not None:
        check_path("out", out, error=OutputError)
        check_path("out", out, error=OutputError, written="file" if _is_file(out) else "folder")
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=skip_invalid,
        document_limit_mib=document_limit_mib,
        skip_hint="; or skip invalid documents with `ms-data tokenizer --skip-invalid`",
    )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    # Byte-level BPE with all 256 bytes in the alphabet never needs an unknown token.
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],  # gets id 0
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
    """Return whether `out` means a file: by its name, or because a file exists there."""
    with decoding(out, error=OutputError):
        exists = os.path.exists(out) and not os.path.isdir(out)
    return Path(out).suffix.lower() == ".json" or exists


def _split_long_words(text: str) -> Iterator[str]:
    """Cut a text inside words of a thousand characters or more.

    Training time is quadratic in the word length, and such words are useless for training.
    """
    begin = 0
    for run in LONG_WORD.finditer(text):
        for end in range(
            run.start() + MAX_WORD_LENGTH, run.end(), MAX_WORD_LENGTH
        ):  # cut inside the run
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
        yield from _split_long_words(document.text)
    if document is None:
        raise CorpusError(
            f"{source.name} is empty: no text in {len(source.files)} files; use a corpus with text"
        )
