"""Turns text into tokens and back: a thin face over a `tokenizers` file."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray

from ms_data.chat.template import Rendered
from ms_data.disk.split import read_index
from ms_data.errors import DamageError, DataError, OutputError, TokenizerError, printable
from ms_data.files.durable import write_files, writing
from ms_data.files.untrusted import check_path, read_bytes
from ms_data.tokenization import tokenizer_folder, tokenizer_limits
from ms_data.tokenization.tokenizer_folder import TokenizerFolder
from ms_data.tokenization.word_encoder import WordEncoder

END_OF_TEXT = "<|endoftext|>"

MOST_AROUND = 16
"""No tokenizer puts more tokens before or after a text."""

# The end of a document goes by these names in published tokenizers, most telling first.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")


class Tokenizer:
    """A tokenizer read from the JSON of a `tokenizers` file.

    Text is always plain text: a special token that is spelt out in a document is encoded as the
    characters it is written with, so no document can end another.

    Args:
        content: the bytes of a `tokenizer.json`.
        end_of_text: the token that ends a document, by name or id; None looks for the usual names,
            special tokens first.
        begin_of_text: the token that begins a document, by name or id; False for none; None for
            the tokens that `tokenizer.json` puts before a text, as transformers does.

    Raises:
        TokenizerError: the bytes are not a tokenizer, its sizes are beyond any real tokenizer, or
            it has no such token.
    """

    def __init__(
        self,
        content: bytes,
        *,
        end_of_text: str | int | None = None,
        begin_of_text: str | int | Literal[False] | None = None,
    ) -> None:
        with _binding("not a tokenizer.json of the `tokenizers` library"):
            file = tokenizer_limits.check_file(content)
            self._model = _load_model(content)
        self._model.encode_special_tokens = True
        self._grows = tokenizer_limits.may_grow(file.normalizer)
        self.folder: Path | None = None
        """Where it was loaded from, if that was a folder."""
        self._chat: tokenizers.Tokenizer | None = None
        self.vocabulary_size = 1 + max(self._model.get_vocab().values(), default=-1)
        if not self.vocabulary_size:
            raise TokenizerError("has no tokens; train one with `ms-data tokenizer`")
        self.end_of_text = self._find_end(end_of_text)
        self.begin_of_text: tuple[int, ...]
        """The tokens before each document: those that transformers puts before a text."""
        self.begin_of_text, self._after = self._around()
        wanted = self.begin_of_text
        if begin_of_text is False:
            wanted = ()
        elif begin_of_text is not None:
            wanted = (self._token(begin_of_text, "begin"),)
        if wanted != self.begin_of_text:
            # tokenizer.json says what documents begin with, so that whoever reads it agrees.
            named = tuple((self._name(token), token) for token in wanted)
            content = tokenizer_folder.with_begin(content, named)
            self.begin_of_text, self._after = wanted, ()
        self.content = content

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        end_of_text: str | int | None = None,
        begin_of_text: str | int | Literal[False] | None = None,
    ) -> "Tokenizer":
        """Read a tokenizer, or that of a model's or shards' folder, with the files next to it.

        `tokenizer_config.json` (and the older `special_tokens_map.json` and `added_tokens.json`)
        name the end of text and may add tokens; they are read as transformers reads them.

        Args:
            path: a folder, or the `tokenizer.json` in it.
            end_of_text: the token that ends a document, by name or id; None takes `eos_token` of
                the folder, then the usual names.
            begin_of_text: see `Tokenizer`.

        Raises:
            TokenizerError: a file cannot be read or is not a tokenizer.
            DamageError: it is not the one that the shards were built with.
        """
        check_path("a tokenizer", path, error=TokenizerError)
        path, wanted = Path(path), None
        folder = path if os.path.isdir(path) else None
        if folder is not None:
            path = folder / tokenizer_folder.TOKENIZER
        home = path.parent
        of_shards = path.name == tokenizer_folder.TOKENIZER and os.path.exists(home / "index.json")
        beside = None
        if of_shards:
            index = read_index(home)
            wanted, end_of_text = index.tokenizer, index.end_of_text
        elif path.name == tokenizer_folder.TOKENIZER:
            beside = TokenizerFolder.read(home)
        try:
            content = read_bytes(
                path, error=TokenizerError, limit_bytes=tokenizer_limits.LIMIT_BYTES
            )
        except TokenizerError as error:
            raise TokenizerError(f"{error}; give a tokenizer.json, or its folder") from error
        if wanted not in (None, xxhash.xxh3_128_hexdigest(content)):
            raise DamageError(path, "file", "its checksum is not the one in the index")
        try:
            if beside is not None:
                with _binding("not a tokenizer.json of the `tokenizers` library"):
                    added = tokenizer_limits.check_file(content).added
                    content = beside.complete(content, added)
                if end_of_text is None:
                    end_of_text = beside.special_tokens.get("eos_token")
            tokenizer = cls(content, end_of_text=end_of_text, begin_of_text=begin_of_text)
        except TokenizerError as error:
            raise TokenizerError(f"{printable(path)}: {error}") from error
        tokenizer.folder = folder
        return tokenizer

    @property
    def digest(self) -> str:
        """Hexadecimal xxh3-128 of the file."""
        return xxhash.xxh3_128_hexdigest(self.content)

    def encode(self, text: str) -> list[int]:
        """Encode one text, without the tokens that begin and end a document."""
        self._check_growth([text])
        return _ids(self._model, text)

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text as a document, with its begin and end, shape (n,) each; use all cores.

        Raises:
            TokenizerError: a text becomes the end of text itself, which would end a document in
                its midst; or the tokenizer fails.
        """
        self._check_growth(texts)
        with _binding("cannot encode a text"):
            encoded = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return self._ended(texts, [np.array(one.ids, np.uint32) for one in encoded])

    def word_encoder(self) -> WordEncoder:
        """Make an encoder of documents that is several times faster, word by word.

        Raises:
            ValueError: there is none for this tokenizer; says why.
        """
        return WordEncoder(self._model)

    def encode_by_words(
        self, texts: Sequence[str], encoder: WordEncoder
    ) -> list[NDArray[np.uint32]]:
        """Do what `encode_documents` does with an encoder of this tokenizer.

        Raises:
            WordsDifferError: a text of the sample that is compared has other tokens.
            TokenizerError: as `encode_documents`.
        """
        self._check_growth(texts)
        with _binding("cannot encode a text"):
            found = encoder.encode(texts)
        return self._ended(texts, found)

    def _ended(
        self, texts: Sequence[str], found: Sequence[NDArray[np.uint32]]
    ) -> list[NDArray[np.uint32]]:
        """Put the begin and the end of text around the tokens of each text."""
        begin = np.array(self.begin_of_text, np.uint32)
        after = np.array((*self._after, self.end_of_text), np.uint32)
        end = after[-1:]
        for text, ids in zip(texts, found, strict=True):
            if (ids == end).any():
                raise TokenizerError(
                    f"makes a text its end of text, token {self.end_of_text} "
                    f"({self.end_of_text_name!r}), as in {printable(text)!r}; name a special "
                    "token, which no text can spell, with --end-of-text"
                )
        return [np.concatenate((begin, ids, after)) for ids in found]

    @property
    def end_of_text_name(self) -> str:
        """The token that ends a document, by its name."""
        return self._name(self.end_of_text)

    @property
    def begin_of_text_names(self) -> tuple[str, ...]:
        """The tokens that begin a document, by their names."""
        return tuple(map(self._name, self.begin_of_text))

    def files(self, special_tokens: Mapping[str, str] | None = None) -> dict[str, bytes]:
        """Make the files, by name, of a folder that `transformers.AutoTokenizer` opens.

        Args:
            special_tokens: such as `bos_token`, by name; the end of text is `eos_token` and
                `pad_token` where they are not among them.
        """
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
        """Write a folder that `Tokenizer.load` and `transformers.AutoTokenizer` open.

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
        """Names of the tokens that stand for no text."""
        added = self._model.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def special_token(self, name: str) -> int:
        """Return the number of a special token.

        Raises:
            TokenizerError: there is none of that name.
        """
        found: int | None = self._model.token_to_id(name)
        if found is None or name not in self.special_tokens:
            raise TokenizerError(
                f"has no special token {name!r}, which the model's processor needs; take the "
                "model's own tokenizer"
            )
        return found

    def encode_chat(self, text: str) -> list[int]:
        """Encode a rendered conversation, in which a special token's name is that token."""
        return _ids(self._chat_model(), text)

    def encode_chats(
        self, chats: Sequence[Rendered]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Encode rendered conversations: tokens (n,) and the loss mask (n,) of their spans."""
        texts = [chat.text for chat in chats]
        self._check_growth(texts)
        with _binding("cannot encode a conversation"):
            encoded = self._chat_model().encode_batch(texts, add_special_tokens=False)
        found = []
        for chat, one in zip(chats, encoded, strict=True):
            offsets = np.array(one.offsets, np.int64).reshape(-1, 2)
            mask = np.zeros(len(offsets), np.bool_)
            for start, stop in chat.spans:
                first = np.searchsorted(offsets[:, 1], start, side="right")
                mask[first : np.searchsorted(offsets[:, 0], stop, side="left")] = True
            found.append((np.array(one.ids, np.int64), mask))
        return found

    def _chat_model(self) -> tokenizers.Tokenizer:
        if self._chat is None:
            self._chat = _load_model(self.content)
            self._chat.encode_special_tokens = False
        return self._chat

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text; special tokens are left out."""
        text: str = self._model.decode([int(one) for one in ids], skip_special_tokens=True)
        return text

    def _find_end(self, wanted: str | int | None) -> int:
        if wanted is not None:
            return self._token(wanted, "end")
        known = {name: self._model.token_to_id(name) for name in _KNOWN_ENDS}
        special = self.special_tokens
        # A vocabulary of HTML tags has `</s>` as ordinary text.
        for name in sorted(_KNOWN_ENDS, key=lambda name: name not in special):
            if (token := known[name]) is not None:
                return int(token)
        raise TokenizerError(
            f"has no end-of-text token such as {', '.join(_KNOWN_ENDS[:3])}; name one of its "
            "tokens with --end-of-text"
        )

    def _token(self, wanted: str | int, edge: str) -> int:
        """Return the id of the token that begins or ends a document, given by name or id."""
        if isinstance(wanted, bool) or not isinstance(wanted, str | int):
            raise TokenizerError(f"{edge}_of_text must be a token's name or id, got {wanted!r}")
        if isinstance(wanted, int):
            if not 0 <= wanted < self.vocabulary_size:
                raise TokenizerError(
                    f"has no token {wanted} to {edge} a text; name one below {self.vocabulary_size}"
                )
            return wanted
        token: int | None = self._model.token_to_id(wanted)
        if token is None:
            raise TokenizerError(
                f"has no {edge}-of-text token {wanted!r}; name one of its tokens with "
                f"--{edge}-of-text"
            )
        return token

    def _name(self, token: int) -> str:
        name: str | None = self._model.id_to_token(token)
        return name or ""

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Find the tokens that tokenizer.json puts before and after a text, the end excluded."""
        processor = self._model.post_processor
        added = 0 if processor is None else processor.num_special_tokens_to_add(False)
        if not added:
            return (), ()
        if added > 2 * MOST_AROUND:
            raise TokenizerError(
                f"puts {added} tokens around each text, more than any; correct the post_processor "
                "in its tokenizer.json"
            )
        for probe in ("a", "1", " ", *sorted(self._model.get_vocab())[:64]):
            plain = self.encode(probe)
            with _binding("cannot encode a text"):
                ids: list[int] = self._model.encode(probe).ids
            places = range(len(ids) - len(plain) + 1)
            before = next((at for at in places if ids[at : at + len(plain)] == plain), None)
            if plain and before is not None:
                after = ids[before + len(plain) :]
                if after and after[-1] == self.end_of_text:
                    after.pop()
                return tuple(ids[:before]), tuple(after)
        raise TokenizerError(
            "changes each text in its post_processor, so its first tokens are unknown; name one "
            "with --begin-of-text"
        )

    def _check_growth(self, texts: Sequence[str]) -> None:
        if self._grows:
            tokenizer_limits.check_growth(self._model.normalizer.normalize_str, texts)


def _ids(model: tokenizers.Tokenizer, text: str) -> list[int]:
    with _binding("cannot encode a text"):
        ids: list[int] = model.encode(text, add_special_tokens=False).ids
    return ids


@contextmanager
def _binding(what: str) -> Iterator[None]:
    """Turn whatever the `tokenizers` library raises, Rust's panics too, into one line."""
    try:
        yield
    except BaseException as error:  # nothing narrower than Exception, and a panic is not even that
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, DataError) or not (isinstance(error, Exception) or panic):
            raise
        raise TokenizerError(
            f"{what} ({printable(' '.join(str(error).split()))}); train one with "
            "`ms-data tokenizer`, or fetch it again"
        ) from error


def _load_model(content: bytes) -> tokenizers.Tokenizer:
    """Load a model without truncation, padding or dropout: a text always has the same tokens."""
    model = tokenizers.Tokenizer.from_str(content.decode())
    model.no_truncation()
    model.no_padding()
    if isinstance(model.model, tokenizers.models.BPE):
        model.model.dropout = None
    return model
