"""On-disk format: the index of a dataset and the layout of a shard.

A dataset is a folder with `index.json`, `tokenizer.json` and shards. A shard contains, in this
order,

        MAGIC      16 bytes, the format and its version
        frames     one zstd frame each: tokens, then the ends of the documents in the frame
        table      one FRAME record per frame: size, checksum and position
        footer     a msgpack `Footer`: totals, and the checksum of the table
        TRAILER    16 bytes: checksum and size of the footer, and an end mark

Frames are the unit of reading, checking and damage. One record and one frame suffice to decode
tokens, their documents and positions, so memory does not grow with the number of documents.
Checksums cover every byte: the table covers the frames, the footer the table, the trailer and the
index cover the footer, the trailer has a fixed structure, and the index contains its own checksum.
"""

import re
import struct
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import xxhash

MAGIC = b"ms-data shard 1\n"
TRAILER = struct.Struct("<QI4s")  # footer's checksum, footer's size, end mark
TRAILER_MARK = b"end\n"

FRAME = np.dtype([("size", "<u4"), ("ends", "<u4"), ("position", "<u8"), ("checksum", "<u8")])
"""Table record of a frame: compressed bytes; document ends in the frame; tokens of its first
document that are in earlier frames; xxh3 of the compressed bytes."""

FRAME_BYTES = 1 << 16
"""Uncompressed token bytes per frame."""

MAX_FRAME_TOKENS = FRAME_BYTES // 2
"""Maximum tokens per frame; a document end then fits the narrowest token type."""

SIZE_LIMIT = 1 << 60
"""Upper bound of all counts and sizes, so that their sums fit 64 bits."""

TokenType = Literal["uint16", "uint32"]

DocumentKind = Literal["text", "conversations", "preferences", "unpaired", "media"]
"""Type of the documents of a dataset."""


class DocumentKindInfo(NamedTuple):
    """Properties of a document type."""

    label: str
    """Name in messages."""
    header_words: int
    """32-bit words before the tokens of every document."""
    stream: str
    """Name of the stream class for this type."""


DOCUMENT_KINDS: dict[DocumentKind, DocumentKindInfo] = {
    "text": DocumentKindInfo("text", 0, "TokenStream"),
    "conversations": DocumentKindInfo("conversations", 1, "InstructionStream"),
    "media": DocumentKindInfo("conversations with images or audio", 4, "InstructionStream"),
    "preferences": DocumentKindInfo("preference pairs", 3, "PreferenceStream"),
    "unpaired": DocumentKindInfo("unpaired preferences", 2, "UnpairedStream"),
}

LOSS_BIT = np.uint32(1 << 31)
"""Bit of a word that marks a token with loss, in datasets other than text."""

MEDIA_SUFFIX = "_media"
"""Suffix of the split with the images and audio of another split."""

BUILD_FILE = "build.json"
"""File with the sources and the summary of a build."""

MEDIA_FILE = "media.json"
"""File with the processor settings, in datasets with images or audio."""

SHARD_NAME = re.compile(r"shard-[0-9]{5,9}\.msd")
_SPLIT_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


def checksum(content: bytes | memoryview, *, seed: int = 0) -> int:
    """Return the 64-bit xxh3 hash of `content`."""
    return xxhash.xxh3_64_intdigest(content, seed)


def token_type_for(vocabulary_size: int, document_kind: DocumentKind = "text") -> TokenType:
    """Return the narrowest type for the tokens of a vocabulary, including the loss bit."""
    return "uint16" if vocabulary_size <= 1 << 16 and document_kind == "text" else "uint32"


def frame_count(tokens: int, frame_tokens: int) -> int:
    """Return the number of frames for `tokens` tokens; only the last one may be short."""
    return -(-tokens // frame_tokens)


class Footer(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.shard.1", forbid_unknown_fields=True
):
    """Totals of a shard, checked against the table and the index."""

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
        """Number of frames in the shard."""
        return frame_count(self.tokens, self.frame_tokens)


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry of a shard in the index."""

    name: str
    split: str
    size_bytes: int
    tokens: int
    documents: int
    footer_checksum: int

    def __post_init__(self) -> None:
        # Only plain file names are valid, so an index cannot point outside its folder.
        _require(SHARD_NAME.fullmatch(self.name) is not None, "name", self.name)
        _require(_SPLIT_NAME.fullmatch(self.split) is not None, "split", self.split)
        _require(self.size_bytes > len(MAGIC) + TRAILER.size, "size_bytes", self.size_bytes)
        _require(self.size_bytes < SIZE_LIMIT, "size_bytes", self.size_bytes)
        _require(0 < self.tokens < SIZE_LIMIT, "tokens", self.tokens)
        _require(0 < self.documents <= self.tokens, "documents", self.documents)

    @property
    def holds_media(self) -> bool:
        """Whether the documents are the images and audio of conversations."""
        return self.split.endswith(MEDIA_SUFFIX)


class Index(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-data.index.1", forbid_unknown_fields=True
):
    """Index of a dataset: the meaning of its tokens, and the shards of every split."""

    token_type: TokenType
    frame_tokens: int
    vocabulary_size: int
    end_of_text: int
    tokenizer: str
    """xxh3-128 of `tokenizer.json`, hexadecimal."""
    held_out_fraction: float = msgspec.field(name="hold_out")
    """Requested fraction of documents in the split `held_out`."""
    shards: tuple[ShardEntry, ...]
    kind: DocumentKind | msgspec.UnsetType = msgspec.UNSET
    """Document type; absent for text."""
    chat: str | msgspec.UnsetType = msgspec.UNSET
    """xxh3-128 of the concatenated chat template files, hexadecimal."""
    fingerprint: str = ""
    """xxh3-128 of this index with an empty fingerprint, hexadecimal; identifies the dataset."""

    def __post_init__(self) -> None:
        _require(0 < self.frame_tokens <= MAX_FRAME_TOKENS, "frame_tokens", self.frame_tokens)
        # `kind` and `chat` are both absent for text, and both present otherwise.
        text = self.kind is msgspec.UNSET
        needed = token_type_for(self.vocabulary_size, self.document_kind)
        _require(needed == self.token_type, "token_type", self.token_type)
        _require(0 < self.vocabulary_size < 1 << 31, "vocabulary_size", self.vocabulary_size)
        _require(text == (self.chat is msgspec.UNSET) and self.kind != "text", "kind", self.kind)
        _require(0 <= self.end_of_text < self.vocabulary_size, "end_of_text", self.end_of_text)
        _require(len(self.shards) > 0, "shards", "none")
        tokens = sum(shard.tokens for shard in self.shards)
        _require(tokens < SIZE_LIMIT, "the sum of tokens", tokens)
        names = [shard.name for shard in self.shards]
        _require(len(set(names)) == len(names), "shards", "the same name twice")

    @property
    def document_kind(self) -> DocumentKind:
        """Document type, including text."""
        return "text" if self.kind is msgspec.UNSET else self.kind

    @property
    def splits(self) -> tuple[str, ...]:
        """Split names in the order of their first shard, without media splits."""
        names = (shard.split for shard in self.shards if not shard.holds_media)
        return tuple(dict.fromkeys(names))


def checksummed_files(index: Index) -> list[tuple[tuple[str, ...], str]]:
    """Return groups of files next to the shards, each with the joint checksum of the group."""
    groups: list[tuple[tuple[str, ...], str]] = [(("tokenizer.json",), index.tokenizer)]
    if index.chat is not msgspec.UNSET:
        media = (MEDIA_FILE,) if index.kind == "media" else ()
        groups.append((("chat_template.jinja", "tokenizer_config.json", *media), index.chat))
    return groups


def encode_sealed(value: msgspec.Struct, field: str) -> bytes:
    """Encode `value` with its own checksum.

    The member `field` becomes the hexadecimal xxh3-128 of the encoding in which it is empty.
    """
    digest = xxhash.xxh3_128_hexdigest(_encode(msgspec.structs.replace(value, **{field: ""})))
    return _encode(msgspec.structs.replace(value, **{field: digest}))


_CHECKSUM_FIELD = re.compile(rb'"checksum": "([0-9a-f]{32})"\n\}\n\Z')


def is_intact(content: bytes) -> bool:
    """Return whether bytes written by `encode_sealed`, with `checksum` last, are unchanged."""
    match = _CHECKSUM_FIELD.search(content)
    if match is None:
        return False
    # The checksum is of the encoding in which the field is empty.
    unsealed = content[: match.start(1)] + content[match.end(1) :]
    return xxhash.xxh3_128_hexdigest(unsealed) == match[1].decode()


def encode_index(index: Index) -> bytes:
    """Encode an index with its fingerprint, deterministically."""
    return encode_sealed(index, "fingerprint")


def decode_index(content: bytes) -> Index:
    """Decode an index and check all its bytes.

    Raises:
        ValueError: the bytes differ from the output of `encode_index`.
    """
    index = msgspec.json.decode(content, type=Index)
    # The encoding is deterministic, so every changed byte makes a difference.
    if encode_index(index) != content:
        raise ValueError("the fingerprint does not match the content")
    return index


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _require(condition: bool, name: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} cannot be {value!r}")
