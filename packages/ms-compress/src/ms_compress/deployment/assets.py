"""What lies beside exported weights: the tokenizer, and how texts begin and end."""

import re
from pathlib import Path
from typing import Any

from ms_compress.errors import ExportError
from ms_compress.files.durable import write_file, write_synced
from ms_compress.files.tokenizer_source import json_text, read_beside
from ms_compress.files.untrusted import read_bytes
from ms_compress.targets.target import Assets
from ms_compress.text_ends import (
    GENERATION,
    check_tokenizer_fits,
    read_tokenizer,
    text_ends,
    text_files,
)

LICENSES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY|COPYING)([-_.].*)?", re.IGNORECASE)
"""Names of license files, which go with whatever is made from a model."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


def read_assets(
    config: dict[str, Any], tokenizer: str | Path | None, *, must_fit: bool = True
) -> Assets:
    """Read the assets of a model; its config gets how texts end, in keys that do not say it.

    Args:
        config: the model's config.json; changed in place.
        tokenizer: a tokenizer.json, or a folder with one.
        must_fit: refuse a tokenizer with tokens beyond the model's vocabulary.

    Raises:
        ExportError: the tokenizer cannot be read, or is another model's.
    """
    files = None if tokenizer is None else read_tokenizer(tokenizer)
    vocabulary = int(config.get("vocab_size") or 2**31)
    if files is not None and must_fit:
        check_tokenizer_fits(files, vocabulary)
    ends = text_ends(files, config, vocabulary)
    for key, value in ends.ids().items():
        if config.get(key) is None:
            config[key] = value
    return Assets(tokenizer=files, ends=ends)


def write_assets(assets: Assets, folder: Path) -> None:
    """Write the tokenizer's files, and how a text is generated."""
    for name, content in text_files(assets.tokenizer, assets.ends).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)  # a model's library may have written its own
        write_synced(folder / name, content)


def carry_files(source: Path, folder: Path, *, tokenizer: bool = True) -> None:
    """Copy a base model's license and tokenizer files and generation settings to a new folder.

    Files that are there already stay as they are; so do generation settings that it has.

    Args:
        source: folder of the base model.
        folder: the new model's.
        tokenizer: False copies only license files, where the new model has another tokenizer.

    Raises:
        ExportError: a file cannot be read.
        WriteError: the folder cannot be written.
    """
    for path in sorted(source.iterdir()):
        wanted = LICENSES.fullmatch(path.name) or (tokenizer and path.name in TOKENIZER_FILES)
        if not wanted or (folder / path.name).exists():
            continue
        for file in sorted(path.glob("*.jinja")) if path.is_dir() else [path]:
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            write_file(copy, read_bytes(file, error=ExportError))
    if tokenizer and (source / GENERATION).is_file():
        settings = read_beside(source, GENERATION, error=ExportError)
        own = read_beside(folder, GENERATION, error=ExportError)
        write_file(folder / GENERATION, json_text({**settings, **own}))
