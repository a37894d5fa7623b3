"""Defines what lies on disk: the index of a dataset and the layout of a shard.

A dataset is a folder: `index.json`, `tokenizer.json` and shards. A shard is, in this order,

    MAGIC      16 bytes, the format and its version
    frames     each one zstd frame of tokens followed by the ends of the documents in it
    table      one FRAME record a frame: how to find, check and place it
    footer     a msgpack `Footer`: totals, and the checksum of the table
    TRAILER    16 bytes: the footer's checksum and size, and a closing mark

Frames are the unit of reading, of checking and of damage: a reader needs one record and one
frame to know its tokens, their documents and their positions, so memory does not grow with the
number of documents. Each byte is covered: frames by the table, the table by the footer, the
footer by the trailer and by the index, the trailer by what it says, and the index by itself.
"""

import re
import struct
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import xxhash

MAGIC = b"ms-data shard 1\n"
TRAILER = struct.Struct("<QI4s")
TRAILER_MARK = b"end\n"

FRAME = np.dtype([("size", "<u4"), ("ends", "<u4"), ("position", "<u8"), ("checksum", "<u8")])
"""One frame: compressed bytes; document ends inside; tokens of its first document that stand
in earlier frames; xxh3 of the compressed bytes."""

FRAME_BYTES = 1 << 16
"""Bytes of tokens in one frame before compression."""

MAX_FRAME_TOKENS = FRAME_BYTES // 2
"""No frame holds more, so that a document's end fits the narrowest token type."""

LARGEST = 1 << 60
"""No count or size reaches it, so that sums of them fit 64 bits."""

TokenType = Literal["uint16", "uint32"]

Kind = Literal["text", "conversations", "preferences", "media"]
"""What the documents of a dataset are."""


class KindInfo(NamedTuple):
    """The facts of one kind of document."""

    label: str
    """What messages call such documents."""
    header_words: int
    """Words before the tokens of each document."""
    stream: str
    """The class that streams them."""


KINDS: dict[Kind, KindInfo] = {
    "text": KindInfo("text", 0, "TokenStream"),
    "conversations": KindInfo("conversations", 1, "InstructionStream"),
    "media": KindInfo("conversations with pictures or sound", 4, "InstructionStream"),
    "preferences": KindInfo("preference pairs", 3, "PreferenceStream"),
}

LOSS_BIT = np.uint32(1 << 31)
"""The bit of a word that says that its token is trained on, in datasets that are not text."""

MEDIA_SUFFIX = "_media"
"""What the name of a split ends in that holds the pictures and sounds of another."""

BUILD_FILE = "build.json"
"""What a dataset was built from, and the summary of the build."""

MEDIA_FILE = "media.json"
"""The settings of the processor, in a folder of conversations with pictures or sound."""

SHARD_NAME = re.compile(r"shard-[0-9]{5,9}\.msd")
_SPLIT_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def checksum(content: bytes | memoryview, *, seed: int = 0) -> int:
    """Return the 64-bit xxh3 of `content`."""
    return xxhash.xxh3_64_intdigest(content, seed)


def token_type_for(vocabulary_size: int, kind: Kind = "text") -> TokenType:
    """Return the narrowest type that holds every token of a vocabulary, and the loss bit."""
    return "uint16" if vocabulary_size <= 1 << 16 and kind == "text" else "uint32"


def frames_of(tokens: int, frame_tokens: int) -> int:
    """Count the frames that hold `tokens` tokens; only the last one may be short."""
    return -(-tokens // frame_tokens)


class Footer(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.shard.1", forbid_unknown_fields=True
):
    """Totals of one shard, checked against the table and the index."""

    token_type: TokenType
    frame_tokens: int
    tokens: int
    documents: int
    table_checksum: int

    def __post_init__(self) -> None:
        _require(0 < self.frame_tokens <= MAX_FRAME_TOKENS, "frame_tokens", self.frame_tokens)
        _require(self.tokens > 0, "tokens", self.tokens)
        _require(0 < self.documents <= self.tokens, "documents", self.documents)

    @property
    def frames(self) -> int:
        """Frames in the shard."""
        return frames_of(self.tokens, self.frame_tokens)


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shard as the index knows it."""

    name: str
    split: str
    size_bytes: int
    tokens: int
    documents: int
    footer_checksum: int

    def __post_init__(self) -> None:
        # The name is a plain file name, so no index can point outside its folder.
        _require(SHARD_NAME.fullmatch(self.name) is not None, "name", self.name)
        _require(_SPLIT_NAME.fullmatch(self.split) is not None, "split", self.split)
        _require(self.size_bytes > len(MAGIC) + TRAILER.size, "size_bytes", self.size_bytes)
        _require(self.size_bytes < LARGEST, "size_bytes", self.size_bytes)
        _require(0 < self.tokens < LARGEST, "tokens", self.tokens)
        _require(0 < self.documents <= self.tokens, "documents", self.documents)

    @property
    def holds_media(self) -> bool:
        """Whether its documents are the pictures and sounds of conversations."""
        return self.split.endswith(MEDIA_SUFFIX)


class Index(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.index.1", forbid_unknown_fields=True
):
    """The whole dataset: what its tokens mean and which shards hold them, split by split."""

    token_type: TokenType
    frame_tokens: int
    vocabulary_size: int
    end_of_text: int
    tokenizer: str
    """Hexadecimal xxh3-128 of `tokenizer.json`."""
    hold_out: float
    """Share of documents asked for in the split `held_out`."""
    shards: tuple[ShardEntry, ...]
    kind: Kind | msgspec.UnsetType = msgspec.UNSET
    """What a document is; not there where it is text."""
    chat: str | msgspec.UnsetType = msgspec.UNSET
    """Hexadecimal xxh3-128 of the chat template's files, one after the other."""
    fingerprint: str = ""
    """Hexadecimal xxh3-128 of this index with an empty fingerprint: names the dataset."""

    def __post_init__(self) -> None:
        _require(0 < self.frame_tokens <= MAX_FRAME_TOKENS, "frame_tokens", self.frame_tokens)
        text = self.kind is msgspec.UNSET
        needed = token_type_for(self.vocabulary_size, self.document_kind)
        _require(needed == self.token_type, "token_type", self.token_type)
        _require(0 < self.vocabulary_size < 1 << 31, "vocabulary_size", self.vocabulary_size)
        _require(text == (self.chat is msgspec.UNSET) and self.kind != "text", "kind", self.kind)
        _require(0 <= self.end_of_text < self.vocabulary_size, "end_of_text", self.end_of_text)
        _require(len(self.shards) > 0, "shards", "none")
        tokens = sum(shard.tokens for shard in self.shards)
        _require(tokens < LARGEST, "the sum of tokens", tokens)
        names = [shard.name for shard in self.shards]
        _require(len(set(names)) == len(names), "shards", "the same name twice")

    @property
    def document_kind(self) -> Kind:
        """What a document is."""
        return "text" if self.kind is msgspec.UNSET else self.kind

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits, in the order of their first shard; not those of media."""
        named = (shard.split for shard in self.shards if not shard.holds_media)
        return tuple(dict.fromkeys(named))


def sealed_files(index: Index) -> list[tuple[tuple[str, ...], str]]:
    """Return the files beside the shards, with the checksum of those that are sealed together."""
    found: list[tuple[tuple[str, ...], str]] = [(("tokenizer.json",), index.tokenizer)]
    if index.chat is not msgspec.UNSET:
        media = (MEDIA_FILE,) if index.kind == "media" else ()
        found.append((("chat_template.jinja", "tokenizer_config.json", *media), index.chat))
    return found


def sealed(value: msgspec.Struct, field: str) -> bytes:
    """Encode `value` with its own checksum.

    Its member `field` becomes the hexadecimal xxh3-128 of the same with that member empty.
    """
    name = xxhash.xxh3_128_hexdigest(_encode(msgspec.structs.replace(value, **{field: ""})))
    return _encode(msgspec.structs.replace(value, **{field: name}))


_SEAL = re.compile(rb'"checksum": "([0-9a-f]{32})"\n\}\n\Z')


def seal_holds(content: bytes) -> bool:
    """Return whether the bytes that `sealed` wrote with a last member `checksum` are unchanged."""
    found = _SEAL.search(content)
    if found is None:
        return False
    empty = content[: found.start(1)] + content[found.end(1) :]
    return xxhash.xxh3_128_hexdigest(empty) == found[1].decode()


def encode_index(index: Index) -> bytes:
    """Encode an index with its fingerprint; the same index always gives the same bytes."""
    return sealed(index, "fingerprint")


def decode_index(content: bytes) -> Index:
    """Read an index and check every byte of it.

    Raises:
        ValueError: the bytes are not exactly what `encode_index` wrote.
    """
    index = msgspec.json.decode(content, type=Index)
    if encode_index(index) != content:
        raise ValueError("its fingerprint does not match its content")
    return index


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _require(holds: bool, name: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} cannot be {value!r}")
