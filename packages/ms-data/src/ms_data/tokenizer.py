"""Text to tokens and back: a thin face over a `tokenizers` file, and training a new one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray

from ms_data.chat import Rendered
from ms_data.dataset import read_index
from ms_data.durable import write_file
from ms_data.errors import CorpusError, DamageError, SettingError, TokenizerError
from ms_data.readers import DOCUMENT_LIMIT_MIB, Corpus, find_corpus

__all__ = ["END_OF_TEXT", "Tokenizer", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""All bytes and the end of a text."""

LARGEST_VOCABULARY = (1 << 31) - 1
"""What the 31 bits of a token on disk can tell apart."""

# The end of a document goes by these names in published tokenizers, most telling first.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")


class Tokenizer:
    """A tokenizer read from the JSON of a `tokenizers` file.

    Text is always plain text: a special token that is spelt out in a document is encoded as the
    characters it is written with, so no document can end another.

    Args:
        content: the bytes of a `tokenizer.json`.
        end_of_text: the token that ends a document, by name or number; None looks for the
            usual names.

    Raises:
        TokenizerError: the bytes are not a tokenizer, or it has no such token.
    """

    def __init__(self, content: bytes, *, end_of_text: str | int | None = None) -> None:
        try:
            self._model = _plain(content)
        except Exception as error:  # the binding raises nothing narrower than Exception
            raise TokenizerError(
                f"not a tokenizer.json of the `tokenizers` library ({error}); "
                "train one with `ms-data tokenizer`"
            ) from error
        self._model.encode_special_tokens = True
        self.content = content
        self.folder: Path | None = None
        """Where it was loaded from, if that was a folder."""
        self._chat: tokenizers.Tokenizer | None = None
        self.vocabulary_size = 1 + max(self._model.get_vocab(with_added_tokens=True).values())
        self.end_of_text = self._find_end(end_of_text)

    @classmethod
    def load(cls, path: str | Path, *, end_of_text: str | int | None = None) -> "Tokenizer":
        """Reads a `tokenizer.json`, or the one in the folder of a model or of shards.

        Raises:
            TokenizerError: the file cannot be read or is not a tokenizer.
            DamageError: it is not the one that the shards were built with.
        """
        path, wanted = Path(path), None
        folder = path if path.is_dir() else None
        if path.is_dir() and not (path / "index.json").exists():
            path = path / "tokenizer.json"  # a tokenizer's own folder
        elif path.is_dir():
            index = read_index(path)
            path, wanted, end_of_text = path / "tokenizer.json", index.tokenizer, index.end_of_text
        try:
            content = path.read_bytes()
        except OSError as error:
            raise TokenizerError(
                f"{path}: cannot be read: {error.strerror}; give a tokenizer.json"
            ) from error
        if wanted not in (None, xxhash.xxh3_128_hexdigest(content)):
            raise DamageError(path, "file", "its checksum is not the one in the index")
        try:
            tokenizer = cls(content, end_of_text=end_of_text)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error
        tokenizer.folder = folder
        return tokenizer

    @property
    def digest(self) -> str:
        """Hexadecimal xxh3-128 of the file."""
        return xxhash.xxh3_128_hexdigest(self.content)

    def encode(self, text: str) -> list[int]:
        """The tokens of one text, without an end."""
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The tokens of each text, each followed by the end of text; uses all cores."""
        encoded = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*one.ids, self.end_of_text], np.int64) for one in encoded]

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that stand for no text, by name."""
        added = self._model.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def encode_chat(self, text: str) -> list[int]:
        """The tokens of a rendered conversation, in which special tokens are what they spell."""
        ids: list[int] = self._chat_model().encode(text, add_special_tokens=False).ids
        return ids

    def encode_chats(
        self, chats: Sequence[Rendered]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Tokens (n,) of each rendered conversation, and which of them its spans touch, (n,)."""
        texts = [chat.text for chat in chats]
        encoded = self._chat_model().encode_batch(texts, add_special_tokens=False)
        found = []
        for chat, one in zip(chats, encoded, strict=True):
            offsets = np.array(one.offsets, np.int64).reshape(-1, 2)
            learnt = np.zeros(len(offsets), np.bool_)
            for start, stop in chat.spans:
                first = np.searchsorted(offsets[:, 1], start, side="right")
                learnt[first : np.searchsorted(offsets[:, 0], stop, side="left")] = True
            found.append((np.array(one.ids, np.int64), learnt))
        return found

    def _chat_model(self) -> tokenizers.Tokenizer:
        if self._chat is None:
            self._chat = _plain(self.content)
            self._chat.encode_special_tokens = False
        return self._chat

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; ends of text are left out."""
        text: str = self._model.decode([int(one) for one in ids], skip_special_tokens=True)
        return text

    def _find_end(self, wanted: str | int | None) -> int:
        if isinstance(wanted, int):
            if not 0 <= wanted < self.vocabulary_size:
                raise TokenizerError(
                    f"has no token {wanted} to end a text; name one below {self.vocabulary_size}"
                )
            return wanted
        for candidate in (wanted,) if wanted is not None else _KNOWN_ENDS:
            found: int | None = self._model.token_to_id(candidate)
            if found is not None:
                return found
        name = repr(wanted) if wanted is not None else "such as " + ", ".join(_KNOWN_ENDS[:3])
        raise TokenizerError(
            f"has no end-of-text token {name}; name one of its tokens with --end-of-text"
        )


def _plain(content: bytes) -> tokenizers.Tokenizer:
    """A model that gives the same text the same tokens every time, and all of them."""
    model = tokenizers.Tokenizer.from_str(content.decode())
    model.no_truncation()
    model.no_padding()
    if isinstance(model.model, tokenizers.models.BPE):
        model.model.dropout = None
    return model


def train_tokenizer(
    corpus: str | Path,
    *,
    vocab_size: int,
    out: str | Path | None = None,
    text_key: str = "text",
    skip_invalid: bool = False,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_leave_out: Callable[[str], None] = lambda kind: None,
) -> Tokenizer:
    """Learns a byte-level BPE from a corpus; any text can be encoded with it.

    Args:
        corpus: as for `build`.
        vocab_size: most tokens to learn, the 256 bytes and the end of text included.
        out: where to write `tokenizer.json`; None keeps it in memory.
        text_key: the member of a JSON line that holds the text.
        skip_invalid: leave out what is not valid text.
        document_limit_mib: a document, once unpacked, of more than so many MiB is not valid.
        on_progress: hears how many of how many bytes of the corpus are read.
        on_leave_out: hears of each file of a folder that is no text what it is.

    Raises:
        SettingError: vocab_size has no room for the bytes, or shards have none for it.
        CorpusError: the corpus is missing, empty or malformed.
        OutputError: `out` cannot be written.
    """
    if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise SettingError(
            f"vocab_size is {vocab_size}; it must be {SMALLEST_VOCABULARY} or more, "
            f"which is every byte and the end of text, and {LARGEST_VOCABULARY} at most"
        )
    source = find_corpus(
        corpus,
        text_key=text_key,
        skip_invalid=skip_invalid,
        document_limit_mib=document_limit_mib,
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
    if out is not None:
        write_file(Path(out), tokenizer.content)
    return tokenizer


def _texts(
    source: Corpus,
    on_progress: Callable[[int, int], None],
    on_leave_out: Callable[[str], None],
) -> Iterator[str]:
    document = None
    for document in source.documents(on_leave_out=on_leave_out):
        on_progress(document.read_bytes, source.size_bytes)
        yield document.text
    if document is None:
        raise CorpusError(
            f"{source.name} is empty: no text in {len(source.files)} files; "
            "give a corpus that holds text"
        )
