"""What lies beside exported weights: the tokenizer, and how texts begin and end."""

from pathlib import Path
from typing import Any

from ms_compress.files.durable import write_synced
from ms_compress.targets.target import Assets
from ms_compress.text_ends import check_fits, read_tokenizer, text_ends, text_files


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
        check_fits(files, vocabulary)
    ends = text_ends(files, config, vocabulary)
    for key, value in ends.ids().items():
        if config.get(key) is None:
            config[key] = value
    return Assets(tokenizer=files, ends=ends)


def write_assets(assets: Assets, folder: Path) -> None:
    """Write the tokenizer's files, and how a text is generated."""
    for name, content in text_files(assets.tokenizer, assets.ends).items():
        (folder / name).unlink(missing_ok=True)  # a model's library may have written its own
        write_synced(folder / name, content)
