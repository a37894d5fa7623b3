"""Detects a file's type by its first bytes: text, compressed text, or not text."""

import codecs
from collections.abc import Mapping
from typing import NamedTuple

HEAD_BYTES = 512
"""Bytes needed for detection. A tar header has its magic at byte 257, all other formats earlier."""

_UNPACK = "unpack it and pass the folder"
_ROWS = "write its rows as JSON Lines (.jsonl) or Parquet"
_TEXT = "pass text files"


class NotText(NamedTuple):
    """A file type that is not text."""

    name: str
    """Name of the file type, such as `zip archive`."""
    remedy: str = _TEXT


FileType = NotText | str
"""Detected type: the compression `gz` or `zst`, "" for uncompressed text, or a type that is not
text."""

_PACKED = {b"\x1f\x8b\x08": "gz", b"\x28\xb5\x2f\xfd": "zst"}

_SIGNATURES: dict[tuple[int, bytes], NotText] = {
    (0, b"PK\x03\x04"): NotText("zip archive", _UNPACK),
    (0, b"PK\x05\x06"): NotText("zip archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c"): NotText("7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07"): NotText("rar archive", _UNPACK),
    (0, b"!<arch>\n"): NotText("ar archive", _UNPACK),
    (4, b"1AY&SY"): NotText("bzip2 file", "decompress it, or compress it with gzip or zstd"),
    (0, b"\xfd7zXZ\x00"): NotText("xz file", "decompress it, or compress it with gzip or zstd"),
    (0, b"\x04\x22\x4d\x18"): NotText(
        "lz4 file", "decompress it, or compress it with gzip or zstd"
    ),
    (0, b"Obj\x01"): NotText("Avro table", _ROWS),
    (0, b"SQLite format 3\x00"): NotText("SQLite database", _ROWS),
    (0, b"\x89HDF\r\n\x1a\n"): NotText("HDF5 file", _ROWS),
    (0, b"\x93NUMPY"): NotText("NumPy array", _ROWS),
    (0, b"%PDF-"): NotText("PDF document", "extract its text"),
    (0, b"{\\rtf1"): NotText("RTF document", "save it as plain text"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"): NotText("Office document", "save it as plain text"),
    (0, b"\x89PNG\r\n\x1a\n"): NotText("PNG image"),
    (0, b"\xff\xd8\xff"): NotText("JPEG image"),
    (0, b"GIF87a"): NotText("GIF image"),
    (0, b"GIF89a"): NotText("GIF image"),
    (0, b"II*\x00"): NotText("TIFF image"),
    (0, b"MM\x00*"): NotText("TIFF image"),
    (8, b"WEBP"): NotText("WebP image"),
    (8, b"WAVE"): NotText("WAV audio"),
    (0, b"fLaC"): NotText("FLAC audio"),
    (0, b"OggS\x00"): NotText("Ogg audio"),
    (0, b"ID3\x02\x00"): NotText("MP3 audio"),
    (0, b"ID3\x03\x00"): NotText("MP3 audio"),
    (0, b"ID3\x04\x00"): NotText("MP3 audio"),
    (4, b"ftyp"): NotText("MP4 video"),
    (0, b"\x7fELF"): NotText("ELF program"),
    (0, b"\xca\xfe\xba\xbe"): NotText("Java class or Mach-O program"),
    (0, b"\xcf\xfa\xed\xfe"): NotText("Mach-O program"),
    (0, b"\x00asm"): NotText("WebAssembly program"),
    (0, b"wOF2"): NotText("font"),
    (0, b"wOFF"): NotText("font"),
    (0, b"GGUF"): NotText("GGUF model"),
    (0, b"ms-data shard "): NotText("shard of ms-data", "pass the text that it was built from"),
}
"""File types by (offset, magic bytes). Binary formats with NUL bytes are detected without an entry;
an entry gives them a name."""

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}

BINARY = NotText("file with NUL bytes")


def non_utf8_encoding(head: bytes) -> str | None:
    """Return why a file is not UTF-8 according to its byte order mark, or None."""
    for bom, encoding in _MARKS.items():
        if head.startswith(bom):
            return f"text in {encoding}; convert it with `iconv -f {encoding} -t UTF-8`"
    return None


def detect_file_type(head: bytes) -> FileType:
    """Detect a file's type from its first bytes; more than `HEAD_BYTES` are not needed."""
    for (offset, signature), file_type in _SIGNATURES.items():
        if head.startswith(signature, offset) and _plausible(signature, head):
            return file_type
    for signature, compression in _PACKED.items():
        if head.startswith(signature):
            return compression
    return BINARY if b"\0" in head else ""


def _plausible(signature: bytes, head: bytes) -> bool:
    """Return whether a match is real: magic bytes made of letters also occur in plain text."""
    if signature in (b"WEBP", b"WAVE"):
        return head.startswith(b"RIFF")
    if signature == b"1AY&SY":
        return head.startswith(b"BZh")
    # Such as GGUF or wOFF: a text can start with these letters, but has no NUL bytes.
    return not signature.isalnum() or b"\0" in head


def omissions(left_out: Mapping[str, int], skipped: int = 0, empty: int = 0) -> str:
    """Describe skipped documents and files as the end of a line; empty if nothing was skipped."""
    count = sum(left_out.values())
    listing = ", ".join(f"{number:,} {file_type}" for file_type, number in sorted(left_out.items()))
    files = "file" if count == 1 else "files"
    invalid = f", {skipped:,} invalid ones skipped" if skipped else ""
    without_text = f", {empty:,} empty ones skipped" if empty else ""
    return (
        invalid
        + without_text
        + (f", {count:,} non-text {files} skipped ({listing})" if count else "")
    )
