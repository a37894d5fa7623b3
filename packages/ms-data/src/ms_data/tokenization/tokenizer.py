"""Tokenizers, as thin wrappers of the `tokenizers` library."""

import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray

from ms_data.arguments import check_items, check_type, shown
from ms_data.chat.template import Rendered
from ms_data.disk.split import read_index
from ms_data.errors import DamageError, DataError, OutputError, TokenizerError, printable
from ms_data.files.durable import write_files, writing
from ms_data.files.untrusted import check_path, read_bytes
from ms_data.settings.arguments import is_integer
from ms_data.tokenization import tokenizer_folder, tokenizer_limits
from ms_data.tokenization.tokenizer_folder import TokenizerFolder
from ms_data.tokenization.word_encoder import WordEncoder

END_OF_TEXT = "<|endoftext|>"

MAX_TOKENS_AROUND = 16
"""Largest number of special tokens that a tokenizer adds before or after a text."""

# Names of the end-of-text token in published tokenizers, the most specific first.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")


class Tokenizer:
    """A tokenizer created from the JSON of a `tokenizers` file.

    Documents are always plain text: the name of a special token in a document is encoded as
    ordinary characters, so a document cannot end another one.

    Args:
        content: content of a `tokenizer.json`.
        end_of_text: token that ends a document, by name or ID. None: look for the usual names,
            special tokens first.
        begin_of_text: token that starts a document, by name or ID; False for none. None: the tokens
            that `tokenizer.json` adds before a text, as in transformers.

    Raises:
        TokenizerError: the content is not a tokenizer, exceeds the limits of real tokenizers, or
            has no such token.
    """

    def __init__(
        self,
        content: bytes,
        *,
        end_of_text: str | int | None = None,
        begin_of_text: str | int | Literal[False] | None = None,
    ) -> None:
        with _library_errors("not a tokenizer.json of the `tokenizers` library"):
            file = tokenizer_limits.check_file(content)
            self._model = _load_model(content)
        self._model.encode_special_tokens = True
        self._grows = tokenizer_limits.may_grow(file.normalizer)
        self.folder: Path | None = None
        """Folder that it was loaded from, if any."""
        self._chat: tokenizers.Tokenizer | None = None
        # ids may have gaps
        self.vocabulary_size = 1 + max(self._model.get_vocab().values(), default=-1)
        if not self.vocabulary_size:
            raise TokenizerError("has no tokens; train one with `ms-data tokenizer`")
        self.end_of_text = self._find_end(end_of_text)
        self.begin_of_text: tuple[int, ...]
        """Tokens before every document, as transformers adds them before a text."""
        self.begin_of_text, self._tokens_after = self._find_tokens_around()
        begin_tokens = self.begin_of_text
        if begin_of_text is False:
            begin_tokens = ()
        elif begin_of_text is not None:
            begin_tokens = (self._token(begin_of_text, "begin"),)
        if begin_tokens != self.begin_of_text:
            # Write the tokens into tokenizer.json, so that other libraries add the same ones.
            named = tuple((self._name(token), token) for token in begin_tokens)
            content = tokenizer_folder.set_begin_tokens(content, named)
            self.begin_of_text, self._tokens_after = begin_tokens, ()
        self.content = content

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        end_of_text: str | int | None = None,
        begin_of_text: str | int | Literal[False] | None = None,
    ) -> "Tokenizer":
        """Load a tokenizer.json, or the tokenizer of a folder together with the files next to it.

        `tokenizer_config.json` (and the older `special_tokens_map.json` and `added_tokens.json`)
        name the end-of-text token and may add tokens, as in transformers.

        Args:
            path: the folder of a model or of shards, or the `tokenizer.json` in it.
            end_of_text: token that ends a document, by name or ID. None: `eos_token` of the folder,
                then the usual names.
            begin_of_text: see `Tokenizer`.

        Raises:
            TokenizerError: a file cannot be read, or is not a tokenizer.
            DamageError: the file differs from the tokenizer of the shards.
        """
        check_path("a tokenizer", path, error=TokenizerError)
        path, expected = Path(path), None
        folder = path if os.path.isdir(path) else None
        if folder is not None:
            path = folder / tokenizer_folder.TOKENIZER
        parent = path.parent
        in_shards = path.name == tokenizer_folder.TOKENIZER and os.path.exists(
            parent / "index.json"
        )
        siblings = None
        if in_shards:
            index = read_index(parent)
            expected, end_of_text = index.tokenizer, index.end_of_text
        elif path.name == tokenizer_folder.TOKENIZER:
            siblings = TokenizerFolder.read(parent)
        try:
            content = read_bytes(
                path, error=TokenizerError, limit_bytes=tokenizer_limits.LIMIT_BYTES
            )
        except TokenizerError as error:
            raise TokenizerError(f"{error}; pass a tokenizer.json, or its folder") from error
        if expected not in (None, xxhash.xxh3_128_hexdigest(content)):
            raise DamageError(path, "file", "checksum differs from the index")
        try:
            if siblings is not None:
                with _library_errors("not a tokenizer.json of the `tokenizers` library"):
                    added = tokenizer_limits.check_file(content).added
                    content = siblings.complete(content, added)
                if end_of_text is None:
                    end_of_text = siblings.special_tokens.get("eos_token")
            tokenizer = cls(content, end_of_text=end_of_text, begin_of_text=begin_of_text)
        except TokenizerError as error:
            raise TokenizerError(f"{printable(path)}: {error}") from error
        tokenizer.folder = folder
        return tokenizer

    @property
    def digest(self) -> str:
        """xxh3-128 of the file, hexadecimal."""
        return xxhash.xxh3_128_hexdigest(self.content)

    def encode(self, text: str) -> list[int]:
        """Encode one text, without the tokens that start and end a document."""
        self._check_growth([text])
        return _ids(self._model, text)

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode texts as documents, with start and end tokens; shape (n,) each. Uses all cores.

        Raises:
            TokenizerError: a text is encoded with the end-of-text token, which would split the
                document; or the library fails.
        """
        self._check_growth(texts)
        with _library_errors("cannot encode a text"):
            encoded = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return self._add_begin_and_end(
            texts, [np.array(encoding.ids, np.uint32) for encoding in encoded]
        )

    def word_encoder(self) -> WordEncoder:
        """Return a document encoder that works word by word and is several times faster.

        Raises:
            ValueError: this tokenizer is not supported; gives the reason.
        """
        return WordEncoder(self._model)

    def encode_by_words(
        self, texts: Sequence[str], encoder: WordEncoder
    ) -> list[NDArray[np.uint32]]:
        """Encode documents like `encode_documents`, with a word encoder of this tokenizer.

        Raises:
            WordsDifferError: the word encoder's tokens of a checked text differ from the library's.
            TokenizerError: as in `encode_documents`.
        """
        self._check_growth(texts)
        with _library_errors("cannot encode a text"):
            ids = encoder.encode(texts)
        return self._add_begin_and_end(texts, ids)

    def _add_begin_and_end(
        self, texts: Sequence[str], encoded: Sequence[NDArray[np.uint32]]
    ) -> list[NDArray[np.uint32]]:
        """Add the start and end tokens to the tokens of every text."""
        # The end token must not occur inside a document, because readers split there.
        begin = np.array(self.begin_of_text, np.uint32)
        after = np.array((*self._tokens_after, self.end_of_text), np.uint32)
        end = after[-1:]
        for text, ids in zip(texts, encoded, strict=True):
            if (ids == end).any():
                raise TokenizerError(
                    f"encodes a text with the end-of-text token {self.end_of_text} "
                    f"({self.end_of_text_name!r}), as in {printable(text)!r}; use a special "
                    "token, which no text can contain, with --end-of-text"
                )
        return [np.concatenate((begin, ids, after)) for ids in encoded]

    @property
    def end_of_text_name(self) -> str:
        """Name of the token that ends a document."""
        return self._name(self.end_of_text)

    @property
    def begin_of_text_names(self) -> tuple[str, ...]:
        """Names of the tokens that start a document."""
        return tuple(map(self._name, self.begin_of_text))

    def files(self, special_tokens: Mapping[str, str] | None = None) -> dict[str, bytes]:
        """Return the files of a folder that `transformers.AutoTokenizer` can load, by name.

        Args:
            special_tokens: token names by role, such as `bos_token`; `eos_token` and `pad_token`
                default to the end-of-text token.
        """
        description = "names by role"
        check_type(
            "special_tokens",
            special_tokens,
            Mapping,
            description,
            error=TokenizerError,
            optional=True,
        )
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": self.end_of_text_name,
            "pad_token": self.end_of_text_name,
            **({"bos_token": self._name(self.begin_of_text[0])} if self.begin_of_text else {}),
            **(special_tokens or {}),
        }
        encoded = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        return {"tokenizer.json": self.content, "tokenizer_config.json": encoded}

    def save(self, folder: str | Path) -> None:
        """Write a folder that `Tokenizer.load` and `transformers.AutoTokenizer` can load.

        Raises:
            OutputError: the folder cannot be written.
        """
        check_path("folder", folder, error=OutputError, written="folder")
        folder = Path(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_files({folder / name: content for name, content in self.files().items()})

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Names of the special tokens."""
        added = self._model.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def special_token(self, name: str) -> int:
        """Return the ID of a special token.

        Raises:
            TokenizerError: the tokenizer has no special token of this name.
        """
        check_type("name", name, str, "a string", error=TokenizerError)
        token: int | None = self._model.token_to_id(name)
        if token is None or name not in self.special_tokens:
            raise TokenizerError(
                f"has no special token {name!r}, which the model's processor needs; use the "
                "tokenizer of the model"
            )
        return token

    def encode_chat(self, text: str) -> list[int]:
        """Encode a rendered conversation; names of special tokens become these tokens."""
        return _ids(self._chat_model(), text)

    def encode_chats(
        self, chats: Sequence[Rendered]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Encode rendered conversations; returns tokens (n,) and loss mask (n,) of each."""
        check_items("chats", chats, Rendered, "Rendered conversations", error=TokenizerError)
        texts = [chat.text for chat in chats]
        self._check_growth(texts)
        with _library_errors("cannot encode a conversation"):
            encoded = self._chat_model().encode_batch(texts, add_special_tokens=False)
        results = []
        for chat, encoding in zip(chats, encoded, strict=True):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            mask = np.zeros(len(offsets), np.bool_)
            # A token has loss if it overlaps a span.
            for start, stop in chat.spans:
                first = np.searchsorted(offsets[:, 1], start, side="right")
                mask[first : np.searchsorted(offsets[:, 0], stop, side="left")] = True
            results.append((np.array(encoding.ids, np.int64), mask))
        return results

    def _chat_model(self) -> tokenizers.Tokenizer:
        if self._chat is None:
            self._chat = _load_model(self.content)
            self._chat.encode_special_tokens = False
        return self._chat

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text, without special tokens.

        Raises:
            TokenizerError: a token is not an integer of at least 0.
        """
        check_type("ids", ids, Iterable, "a list of integers", error=TokenizerError)
        ids = list(ids)
        for token in ids:
            if not is_integer(token) or operator.index(token) < 0:
                raise TokenizerError(
                    f"a token must be an integer of at least 0, got {shown(token)}; use encoded ids"
                )
        text: str = self._model.decode(
            [operator.index(token) for token in ids], skip_special_tokens=True
        )
        return text

    def _find_end(self, end_of_text: str | int | None) -> int:
        if end_of_text is not None:
            return self._token(end_of_text, "end")
        token_ids = {name: self._model.token_to_id(name) for name in _KNOWN_ENDS}
        special = self.special_tokens
        # Special tokens first: `</s>` may also be an ordinary HTML tag in the vocabulary.
        for name in sorted(_KNOWN_ENDS, key=lambda name: name not in special):
            if (token := token_ids[name]) is not None:
                return int(token)
        raise TokenizerError(
            f"has no end-of-text token such as {', '.join(_KNOWN_ENDS[:3])}; set another "
            "tokens with --end-of-text"
        )

    def _token(self, name_or_id: str | int, edge: str) -> int:
        """Return the ID of the token that starts or ends a document, given by name or ID."""
        if isinstance(name_or_id, bool) or not isinstance(name_or_id, str | int):
            raise TokenizerError(
                f"{edge}_of_text must be a token's name or id, got {shown(name_or_id)}"
            )
        if isinstance(name_or_id, int):
            if not 0 <= name_or_id < self.vocabulary_size:
                raise TokenizerError(
                    f"has no token {name_or_id} to {edge} a text; use an id below "
                    f"{self.vocabulary_size}"
                )
            return name_or_id
        token: int | None = self._model.token_to_id(name_or_id)
        if token is None:
            raise TokenizerError(
                f"has no {edge}-of-text token {name_or_id!r}; set another token with "
                f"--{edge}-of-text"
            )
        return token

    def _name(self, token: int) -> str:
        name: str | None = self._model.id_to_token(token)
        return name or ""

    def _find_tokens_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that tokenizer.json adds before and after a text, minus end of text."""
        processor = self._model.post_processor
        added = 0 if processor is None else processor.num_special_tokens_to_add(False)
        if not added:
            return (), ()
        if added > 2 * MAX_TOKENS_AROUND:
            raise TokenizerError(
                f"adds {added} tokens around each text, more than any real tokenizer; correct the "
                "post_processor in its tokenizer.json"
            )
        # Find them by encoding a probe with and without special tokens.
        for probe in ("a", "1", " ", *sorted(self._model.get_vocab())[:64]):
            plain = self.encode(probe)
            with _library_errors("cannot encode a text"):
                ids: list[int] = self._model.encode(probe).ids
            offsets = range(len(ids) - len(plain) + 1)
            before = next(
                (offset for offset in offsets if ids[offset : offset + len(plain)] == plain), None
            )
            if plain and before is not None:
                after = ids[before + len(plain) :]
                if after and after[-1] == self.end_of_text:
                    after.pop()
                return tuple(ids[:before]), tuple(after)
        raise TokenizerError(
            "changes each text in its post_processor, so its first tokens are unknown; set the "
            "first token with --begin-of-text"
        )

    def _check_growth(self, texts: Sequence[str]) -> None:
        if self._grows:
            tokenizer_limits.check_growth(self._model.normalizer.normalize_str, texts)


def _ids(model: tokenizers.Tokenizer, text: str) -> list[int]:
    with _library_errors("cannot encode a text"):
        ids: list[int] = model.encode(text, add_special_tokens=False).ids
    return ids


@contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Convert the errors of the `tokenizers` library, including Rust panics, to TokenizerError."""
    try:
        yield
    except BaseException as error:  # the library raises plain Exception; a panic is not even that
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, DataError) or not (isinstance(error, Exception) or panic):
            raise
        raise TokenizerError(
            f"{problem} ({printable(' '.join(str(error).split()))}); train one with "
            "`ms-data tokenizer`, or download it again"
        ) from error


def _load_model(content: bytes) -> tokenizers.Tokenizer:
    """Load a model without truncation, padding or dropout, so that encoding is deterministic."""
    model = tokenizers.Tokenizer.from_str(content.decode())
    model.no_truncation()
    model.no_padding()
    if isinstance(model.model, tokenizers.models.BPE):
        model.model.dropout = None
    return model
