"""Finds the files of a corpus."""

import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ms_data.arguments import shown
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.dataset_folders import select_data_files
from ms_data.corpus.places import CorpusFile, is_remote, remote_files, strip_credentials
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB, ReadOptions
from ms_data.corpus.readers import READERS
from ms_data.errors import CorpusError, SettingError, printable
from ms_data.files.untrusted import check_path
from ms_data.settings.arguments import check_flags, check_strings

CorpusName = str | Path | Sequence[str | Path]
"""A file, folder or URL; a list of these, read in order; or `stdlib`."""

_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}


class _CorpusEntry(NamedTuple):
    """Files of one entry of the corpus argument."""

    files: Mapping[str, CorpusFile]
    """Files by relative path, in reading order."""
    folder: bool


def find_corpus(
    corpus: CorpusName,
    *,
    text_column: str = "text",
    skip_invalid: bool = False,
    parse: Callable[[Mapping[str, Any]], str] | None = None,
    columns: bool = False,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    skip_hint: str = ReadOptions().skip_hint,
) -> Corpus:
    """Find the files of a corpus: files, folders, URLs of either, or `stdlib`.

    Readers are chosen by file name and first bytes, see `readers`; a file that no reader claims is
    one text document. Files may be compressed with gzip (.gz) or zstd (.zst). Folders are read in
    the order of file names; hidden files are skipped, links are followed, and a folder that is
    linked twice is read once. In a folder saved by `datasets`, only the listed shards are read.
    Non-text files (archives, images, programs, anything with NUL bytes) are skipped during reading.
    URLs such as s3://bucket/folder are read through fsspec. `stdlib` means the sources of the
    standard library of the running Python.

    Raises:
        SettingError: the document limit is below 1.
        CorpusError: a path does not exist, holds no files, or is a broken link.
    """
    check_strings(text_column=text_column)
    check_flags(skip_invalid=skip_invalid)
    if not isinstance(corpus, str | Path | Sequence):
        raise SettingError(
            f"corpus must be a path, a URL or a list of paths and URLs, got {shown(corpus)}"
        )
    entries = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    if not entries:
        raise CorpusError("the corpus is an empty list; pass one or more files or folders")
    for entry in entries:
        if not is_remote(str(entry)):
            check_path("corpus", entry, error=CorpusError)
    is_stdlib = str(entries[0]) == "stdlib" and len(entries) == 1 and not Path("stdlib").exists()
    parts = [_stdlib() if is_stdlib else _find_entry(entry) for entry in entries]
    has_many = len(parts) > 1
    files = [
        (f"{number}/{name}" if has_many else name, file, part.folder)
        for number, part in enumerate(parts)
        for name, file in part.files.items()
    ]
    return Corpus(
        name=strip_credentials(" ".join(map(str, entries))),
        files=tuple(file for _, file, _ in files),
        names=tuple(name for name, _, _ in files),
        # A file that the user names must be text; in a folder, other files are skipped.
        named=frozenset(file for _, file, folder in files if not folder),
        reader=READERS["python_source"] if is_stdlib else None,
        options=ReadOptions(
            text_column=text_column,
            # Python's test suite contains sources with deliberate encoding errors.
            skip_invalid=skip_invalid or is_stdlib,
            parse=parse,
            columns=columns,
            document_limit_mib=document_limit_mib,
            skip_hint=skip_hint,
        ),
    )


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table.

    The format is detected by name and first bytes: JSON Lines, a JSON array of objects, CSV, TSV,
    Parquet or Arrow, uncompressed or compressed with gzip or zstd. Null members are dropped.

    Args:
        path: a file, a folder of files, or a URL.

    Yields:
        Values by column name; all values of CSV and TSV files are strings.

    Raises:
        CorpusError: a file is not a table or cannot be read, or a row is invalid.
    """
    # `parse` makes the readers yield rows; it is never called.
    yield from map(dict, find_corpus(path, parse=str).rows())


def _find_entry(corpus: str | Path) -> _CorpusEntry:
    """Find the files of one entry."""
    shown_name = strip_credentials(str(corpus))
    if is_remote(str(corpus)):
        remote_entries, is_folder = remote_files(str(corpus))
        shown = {
            name: file
            for name, file in remote_entries.items()
            if not any(part.startswith(".") for part in PurePosixPath(name).parts)
        }
        files: dict[str, CorpusFile] = dict(
            sorted(shown.items(), key=lambda item: _sort_key(item[0]))
        )
    else:
        path = Path(corpus)
        try:
            is_file, is_folder = path.is_file(), path.is_dir()
            paths = _visible_files(path) if is_folder else [path]
        except OSError as error:
            reason = error.strerror or error
            raise CorpusError(
                f"{printable(corpus)}: cannot be read: {reason}; check the path"
            ) from error
        if not (is_file or is_folder):
            raise CorpusError(f"no file or folder {printable(corpus)}; check the path")
        root = path if is_folder else path.parent
        files = {os.path.relpath(item, root): item for item in paths}
    if is_folder:
        files = select_data_files(files, shown_name)
    if not files:
        raise CorpusError(
            f"{shown_name} is empty: it holds no files to read; pass a folder of text files"
        )
    return _CorpusEntry(files, is_folder)


def _sort_key(name: str) -> tuple[str, ...]:
    # By components, as Paths are sorted: comparing strings would put `a-b` before `a/b`.
    return PurePosixPath(name).parts


def _stdlib() -> _CorpusEntry:
    library = Path(sysconfig.get_path("stdlib"))
    return _CorpusEntry(
        {os.path.relpath(path, library): path for path in _stdlib_files(library)}, True
    )


def _visible_files(folder: Path) -> list[Path]:
    """List the files of a folder; linked folders come last so that files keep their real paths."""
    files: list[Path] = []
    seen: set[tuple[int, int]] = set()
    pending = [folder]
    while pending:
        for folder_path, folders, names in _walk(pending.pop(0)):
            # Device and inode identify a folder that is reached by several links.
            info = os.stat(folder_path)
            if (info.st_dev, info.st_ino) in seen:
                folders.clear()
                continue
            seen.add((info.st_dev, info.st_ino))
            inner = sorted(Path(folder_path, name) for name in folders if not name.startswith("."))
            # visited after all real folders
            pending += [path for path in inner if path.is_symlink()]
            # In place: `_walk` enters the folders that remain in its list.
            folders[:] = [path.name for path in inner if not path.is_symlink()]
            files += [Path(folder_path, name) for name in names if not name.startswith(".")]
    for path in files:
        if path.is_symlink() and not path.exists():
            raise CorpusError(f"{path}: broken link; fix or remove it")
    return sorted(path for path in files if path.is_file())


def _walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a tree as `os.walk` does, which recursed per level before Python 3.12."""
    pending = [str(top)]
    while pending:
        folder_path = pending.pop()
        try:
            with os.scandir(folder_path) as iterator:
                entries = list(iterator)
        except OSError as error:
            raise CorpusError(
                f"{printable(folder_path)}: cannot be read: {error.strerror}; move it higher up, "
                "or grant this user read access"
            ) from error
        folders = [entry.name for entry in entries if entry.is_dir()]
        yield folder_path, folders, [entry.name for entry in entries if not entry.is_dir()]
        pending += [os.path.join(folder_path, name) for name in folders]


def _stdlib_files(library: Path) -> list[Path]:
    files = []
    for folder, folders, names in _walk(library):
        folders[:] = [name for name in folders if name not in _STDLIB_EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)
