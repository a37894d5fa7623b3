"""Locates the shards of a run, building them from raw text first if needed."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.untrusted import read_json
from ms_parallel.settings.validators import STORE_URL, without_credentials
from ms_parallel.training.optional import data_package
from ms_parallel.training.options import USED_WITH_A_STORE, USED_WITH_RAW_TEXT, Options
from ms_parallel.used_settings import check_used

SHARDS, SOURCE, TOKENIZER = "shards", "shards-source.json", "tokenizer.json"
REMOTE, URL_FILE = "dataset", "url.json"
"""Folder in `output_dir` with the index and tokenizer of a dataset in an object store, and the file
with its URL."""


def prepare(dataset_path: str | Path, options: Options) -> Path:
    """Return the folder of shards to train on; build raw text into `output_dir/shards` once.

    Args:
        dataset_path: folder of shards or its URL, file or folder of raw text, or `stdlib`.
        options: options of the run.

    Returns:
        The folder; for shards in an object store, a local folder without the shards themselves,
        which `stream_source` finds.

    Raises:
        ConfigError: output_dir holds shards built with other settings, or a setting has no effect
            with such a dataset.
        ms_data.DataError: the text or the tokenizer cannot be used, or output_dir holds shards of
            other text.
    """
    if (Path(dataset_path) / "index.json").is_file():
        check_used(options, (USED_WITH_RAW_TEXT, USED_WITH_A_STORE), error=ConfigError)
        return Path(dataset_path)
    if is_url(dataset_path):
        remote = remote_shards(str(dataset_path), options)
        if remote.read_index_if_present() is not None:
            check_used(options, (USED_WITH_RAW_TEXT,), error=ConfigError)
            folder = options.output_dir / REMOTE
            remote.copy_description(folder)
            write_file(folder / URL_FILE, msgspec.json.encode(str(dataset_path)))
            return folder
    check_used(options, (USED_WITH_A_STORE,), error=ConfigError)
    tokenizer = options.raw_text_tokenizer
    shards, source = options.output_dir / SHARDS, options.output_dir / SOURCE
    expected = _source(dataset_path, options, tokenizer)
    recorded = _read_source(source, shards)
    trained_tokenizer = options.output_dir / TOKENIZER
    if shards.exists():
        changes = [key for key in expected if recorded.get(key) != expected[key]]
        if changes == ["files"]:
            # Names, sizes or times changed. ms-data compares the contents and rejects other text.
            _build(dataset_path, shards, options, tokenizer, trained_tokenizer)
            with writing(source):
                write_file(source, msgspec.json.encode(expected))
        elif changes:
            raise ConfigError(
                f"{shards} holds shards built with a different {changes[0]}; delete it or set"
                " another output_dir"
            )
        return shards
    with writing(source):
        options.output_dir.mkdir(parents=True, exist_ok=True)
        # Recorded before the build: an interrupted build is resumed only with the same settings.
        if recorded != expected:
            trained_tokenizer.unlink(missing_ok=True)
            write_file(source, msgspec.json.encode(expected))
    _build(dataset_path, shards, options, tokenizer, trained_tokenizer)
    return shards


def is_url(dataset_path: str | Path) -> bool:
    """Return True for a URL such as `s3://bucket/shards`."""
    return "://" in str(dataset_path)


def remote_shards(url: str, options: Options) -> Any:
    """Return the `RemoteShards` of a URL with the run's cache.

    Raises:
        ConfigError: the URL contains credentials.
        ms_data.DataError: the client of the store is not installed.
    """
    if not STORE_URL.fullmatch(url):
        raise ConfigError(
            "dataset must be a URL such as s3://bucket/shards without user, password and query, got"
            f" {without_credentials(url)}; set credentials in the environment"
        )
    return data_package().RemoteShards(
        url, cache=options.dataset_cache, cache_mib=options.dataset_cache_mib
    )


def stream_source(shards: Path, options: Options) -> Any:
    """Return the source of a `TokenStream`: the folder, or the object store that it describes."""
    if not (shards / URL_FILE).is_file():
        return shards
    return remote_shards(read_json(shards / URL_FILE, str, error=ConfigError), options)


def _build(
    corpus: str | Path,
    shards: Path,
    options: Options,
    tokenizer: Path | None,
    trained_tokenizer: Path,
) -> None:
    data = data_package()
    if tokenizer is None and not trained_tokenizer.is_file():
        data.train_tokenizer(
            corpus,
            vocab_size=options.vocab_size,
            out=trained_tokenizer,
            text_column=options.text_column,
        )
    data.build(
        corpus,
        tokenizer=tokenizer or trained_tokenizer,
        out=shards,
        held_out_fraction=options.held_out_fraction,
        text_column=options.text_column,
    )


def _read_source(source: Path, shards: Path) -> dict[str, Any]:
    """Read the recorded settings of the shards; empty without a record.

    A damaged record is ignored as long as no shards exist.
    """
    try:
        return read_json(source, dict, error=ConfigError) if os.path.lexists(source) else {}
    except ConfigError as error:
        if not shards.exists():
            return {}
        raise ConfigError(
            f"{error}, so the settings of {shards} are unknown; move {shards} away to rebuild it"
        ) from error


def _source(corpus: str | Path, options: Options, tokenizer: Path | None) -> dict[str, Any]:
    """Collect all settings and inputs that determine the shards."""
    tokenizer_bytes = _tokenizer_bytes(tokenizer) if tokenizer else b""
    return {
        "corpus": str(corpus),
        "files": _files_digest(Path(corpus)),
        "tokenizer": hashlib.blake2b(tokenizer_bytes, digest_size=16).hexdigest(),
        "vocab_size": 0 if tokenizer else options.vocab_size,
        "held_out_fraction": options.held_out_fraction,
        "text_column": options.text_column,
    }


def _tokenizer_bytes(tokenizer: Path) -> bytes:
    """Read a tokenizer.json, or of a folder also the files that name special tokens."""
    if tokenizer.is_file():
        return tokenizer.read_bytes()
    names = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    files = [tokenizer / name for name in names]
    return b"\0".join(file.read_bytes() for file in files if file.is_file())


def _files_digest(corpus: Path) -> str:
    """Hash the names, sizes and times of a corpus's files, and for `stdlib` the Python version."""
    digest = hashlib.blake2b(digest_size=16)
    # Not a path but `stdlib`, whose text changes with the Python version.
    if not corpus.exists():
        digest.update(sys.version.encode())
    files = [corpus] if corpus.is_file() else sorted(p for p in corpus.rglob("*") if p.is_file())
    for file in files:
        status = file.stat()
        digest.update(os.fsencode(file) + f"\0{status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
