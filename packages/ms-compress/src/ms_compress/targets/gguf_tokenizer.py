"""A tokenizer.json as GGUF metadata: byte-level BPE, which llama.cpp calls `gpt2`."""

import json
from pathlib import Path
from typing import Any

from ms_compress.decoder_config import DecoderConfig
from ms_compress.errors import ExportError

__all__ = ["add_tokenizer", "check_tokenizer"]

SPLITS = {
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "llama-bpe",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "qwen2",
}
"""Regular expressions of pre-tokenizers by llama.cpp's name for them."""


def add_tokenizer(writer: Any, gguf: Any, path: Path | None, config: DecoderConfig) -> None:
    """Add a tokenizer, or that there is none: then llama.cpp takes and gives token numbers alone.

    Args:
        writer: a GGUFWriter.
        gguf: the library.
        path: a tokenizer.json, or None.
        config: of the model, for the number of tokens.

    Raises:
        ExportError: it is no byte-level BPE, or its text is split in a way unknown to llama.cpp.
    """
    if path is None:
        writer.add_tokenizer_model("none")
        return
    document = _read(path)
    added = _added(document)
    by_number = _numbered(document, path, config)
    types = gguf.TokenType
    tokens, kinds = [], []
    for number in range(config.vocabulary):
        tokens.append(by_number.get(number, f"[PAD{number}]"))
        special = number in added and added[number].get("special", False)
        normal = types.CONTROL if special else types.NORMAL
        kinds.append(normal if number in by_number else types.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(document, path))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = document["model"].get("merges") or []
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    end = config.eos if config.eos in by_number else min(added, default=None)
    begin = config.bos if config.bos in by_number else end
    if end is not None:
        writer.add_eos_token_id(end)
    if begin is not None:
        writer.add_bos_token_id(begin)
    writer.add_add_bos_token(False)


def check_tokenizer(path: Path, config: DecoderConfig) -> None:
    """Raise what `add_tokenizer` would."""
    document = _read(path)
    _numbered(document, path, config)
    _split(document, path)


def _added(document: Any) -> dict[int, Any]:
    return {each["id"]: each for each in document.get("added_tokens") or []}


def _numbered(document: Any, path: Path, config: DecoderConfig) -> dict[int, str]:
    """The texts of tokens by number."""
    by_number = {number: text for text, number in document["model"]["vocab"].items()}
    by_number |= {number: each["content"] for number, each in _added(document).items()}
    if by_number and max(by_number) >= config.vocabulary:
        raise ExportError(
            f"{path}: token {max(by_number)} is beyond the model's vocabulary of"
            f" {config.vocabulary}; is it this model's tokenizer?"
        )
    return by_number


def _read(path: Path) -> Any:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        kind = document["model"]["type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"{path}: not a tokenizer.json: {error}") from error
    if kind != "BPE":
        raise ExportError(f"{path}: a tokenizer of type {kind!r}; only byte-level BPE is known")
    return document


def _split(document: Any, path: Path) -> str:
    """llama.cpp's name of how text is cut before merging."""
    cutter = document.get("pre_tokenizer") or {}
    steps = cutter.get("pretokenizers", [cutter])
    byte_level = next((step for step in steps if step.get("type") == "ByteLevel"), None)
    patterns = [s["pattern"].get("Regex") for s in steps if s.get("type") == "Split"]
    if byte_level is not None and byte_level.get("use_regex", True) and not patterns:
        return "gpt-2"
    if byte_level is not None and len(patterns) == 1 and patterns[0] in SPLITS:
        return SPLITS[patterns[0]]
    raise ExportError(
        f"{path}: llama.cpp has no name for how it splits text; export without a tokenizer and"
        " pass token numbers"
    )
