"""Files exported with the weights: tokenizer, special tokens, generation settings and licenses."""

import re
from pathlib import Path
from typing import Any

from ms_compress.errors import ExportError
from ms_compress.files.durable import write_file, write_synced
from ms_compress.files.tokenizer_source import json_text, read_optional_json
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
"""Names of license files, which are copied from a base model to models derived from it."""
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
    """Read the assets of a model, and add missing special tokens to its config.

    Args:
        config: the model's config.json; changed in place.
        tokenizer: tokenizer.json, or a folder with one.
        must_fit: raise for a tokenizer with tokens beyond the model's vocabulary.

    Raises:
        ExportError: the tokenizer cannot be read, or belongs to another model.
    """
    files = None if tokenizer is None else read_tokenizer(tokenizer)
    vocabulary = int(config.get("vocab_size") or 2**31)  # without a size in the config, no limit
    if files is not None and must_fit:
        check_tokenizer_fits(files, vocabulary)
    ends = text_ends(files, config, vocabulary)
    for key, value in ends.ids().items():
        # Ids in the model's own config take precedence; only missing ones are added.
        if config.get(key) is None:
            config[key] = value
    return Assets(tokenizer=files, ends=ends)


def write_assets(assets: Assets, folder: Path) -> None:
    """Write the tokenizer files and generation_config.json."""
    for name, content in text_files(assets.tokenizer, assets.ends).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)  # the model's library may have written its own
        write_synced(folder / name, content)


def carry_files(source: Path, folder: Path, *, tokenizer: bool = True) -> None:
    """Copy a base model's license, tokenizer and generation settings to a new folder.

    Existing files, and existing generation settings, are left unchanged.

    Args:
        source: folder of the base model.
        folder: folder of the new model.
        tokenizer: False copies only license files, for a model with another tokenizer.

    Raises:
        ExportError: a file cannot be read.
        WriteError: the folder cannot be written.
    """
    for path in sorted(source.iterdir()):
        is_asset = LICENSES.fullmatch(path.name) or (tokenizer and path.name in TOKENIZER_FILES)
        if not is_asset or (folder / path.name).exists():
            continue
        # `additional_chat_templates` is a folder of templates.
        for file in sorted(path.glob("*.jinja")) if path.is_dir() else [path]:
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            write_file(copy, read_bytes(file, error=ExportError))
    if tokenizer and (source / GENERATION).is_file():
        settings = read_optional_json(source, GENERATION, error=ExportError)
        existing = read_optional_json(folder, GENERATION, error=ExportError)
        write_file(folder / GENERATION, json_text({**settings, **existing}))
