"""Finds the shards of a run: a folder of them, or raw text that is built into one first."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.untrusted import read_json
from ms_parallel.training.optional import data_package
from ms_parallel.training.options import Options

SHARDS, SOURCE, TOKENIZER = "shards", "shards-source.json", "tokenizer.json"


def prepare(dataset_path: str | Path, options: Options) -> Path:
    """Prepare the folder of shards to train on; raw text is built into `output_dir/shards` once.

    Args:
        dataset_path: a folder of shards; or a file or folder of raw text, or `stdlib`.
        options: the run's.

    Raises:
        ConfigError: output_dir holds the shards of something else.
        ms_data.DataError: the text or the tokenizer cannot be used.
    """
    if (Path(dataset_path) / "index.json").is_file():
        return Path(dataset_path)
    tokenizer = options.raw_text_tokenizer
    shards, source = options.output_dir / SHARDS, options.output_dir / SOURCE
    wanted = _source(dataset_path, options, tokenizer)
    known = _read_source(source, shards)
    if shards.exists():
        if known != wanted:
            differs = next((k for k in wanted if known.get(k) != wanted[k]), "corpus")
            raise ConfigError(
                f"{shards} was built from something else ({differs} differs); delete it, or"
                " choose another output_dir"
            )
        return shards
    own_tokenizer = options.output_dir / TOKENIZER
    with writing(source):
        options.output_dir.mkdir(parents=True, exist_ok=True)
        if known != wanted:
            own_tokenizer.unlink(missing_ok=True)
            write_file(source, msgspec.json.encode(wanted))
    _build(dataset_path, shards, options, tokenizer, own_tokenizer)
    return shards


def _build(
    corpus: str | Path, shards: Path, options: Options, tokenizer: Path | None, own: Path
) -> None:
    data = data_package()
    if tokenizer is None and not own.is_file():
        data.train_tokenizer(
            corpus, vocab_size=options.vocab_size, out=own, text_column=options.text_column
        )
    data.build(
        corpus,
        tokenizer=tokenizer or own,
        out=shards,
        hold_out=options.hold_out,
        text_column=options.text_column,
    )


def _read_source(source: Path, shards: Path) -> dict[str, Any]:
    """Read what the shards were built from; empty where nothing tells.

    That is where there is no record, or a damaged one and no shards yet.
    """
    try:
        return read_json(source, dict, error=ConfigError) if os.path.lexists(source) else {}
    except ConfigError as error:
        if not shards.exists():
            return {}
        raise ConfigError(
            f"{error}; so what {shards} was built from cannot be told: move it away, and it is"
            " built again"
        ) from error


def _source(corpus: str | Path, options: Options, tokenizer: Path | None) -> dict[str, Any]:
    """Collect all that the shards depend on."""
    tokenizer_bytes = _tokenizer_bytes(tokenizer) if tokenizer else b""
    return {
        "corpus": str(corpus),
        "files": _files_digest(Path(corpus)),
        "tokenizer": hashlib.blake2b(tokenizer_bytes, digest_size=16).hexdigest(),
        "vocab_size": 0 if tokenizer else options.vocab_size,
        "hold_out": options.hold_out,
        "text_column": options.text_column,
    }


def _tokenizer_bytes(tokenizer: Path) -> bytes:
    """Read a tokenizer.json and the files of its folder that name special tokens."""
    if tokenizer.is_file():
        return tokenizer.read_bytes()
    names = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    files = [tokenizer / name for name in names]
    return b"\0".join(file.read_bytes() for file in files if file.is_file())


def _files_digest(corpus: Path) -> str:
    """Hash names, sizes and times of a corpus's files; of a named corpus, the Python it is from."""
    digest = hashlib.blake2b(digest_size=16)
    if not corpus.exists():
        digest.update(sys.version.encode())
    files = [corpus] if corpus.is_file() else sorted(p for p in corpus.rglob("*") if p.is_file())
    for file in files:
        facts = file.stat()
        digest.update(os.fsencode(file) + f"\0{facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
