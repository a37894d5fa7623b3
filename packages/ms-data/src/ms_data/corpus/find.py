"""Finds the files of a corpus by what the user typed."""

import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.dataset_folders import without_descriptions
from ms_data.corpus.places import Place, is_remote, remote_files, without_secrets
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB, ReadOptions
from ms_data.corpus.readers import READERS
from ms_data.errors import CorpusError, SettingError, printable
from ms_data.files.untrusted import check_path
from ms_data.settings.arguments import check_flags, check_texts

CorpusName = str | Path | Sequence[str | Path]
"""A file, a folder or an address; several, which are read one after the other; or `stdlib`."""

_LIBRARY_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


class _Part(NamedTuple):
    """The files that one name stands for."""

    files: Mapping[str, Place]
    """By their names below it, in the order of reading."""
    folder: bool


def find_corpus(
    corpus: CorpusName,
    *,
    text_column: str = "text",
    skip_invalid: bool = False,
    parse: Callable[[Mapping[str, Any]], str] | None = None,
    columns: bool = False,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    or_leave_out: str = ReadOptions().or_leave_out,
) -> Corpus:
    """Find the files of a corpus: files, folders of files, addresses of either, or `stdlib`.

    What a file is, its name and first bytes tell: see `readers`. A file that no reader claims is
    one document of text. Any may be packed by gzip (.gz) or zstd (.zst). A folder is read in the
    order of its files' names, hidden ones left out and links followed, each folder once; of a
    folder that `datasets` saved, the shards that it lists. Files that are no text (archives,
    pictures, programs, whatever holds NUL bytes) are left out when they are read. An address such
    as s3://bucket/folder is reached through fsspec. `stdlib` means the running Python's own library
    sources.

    Raises:
        SettingError: the limit is below 1.
        CorpusError: there is no such place, no file in it, or a link to nothing.
    """
    check_texts(text_column=text_column)
    check_flags(skip_invalid=skip_invalid)
    if not isinstance(corpus, str | Path | Sequence):
        raise SettingError(f"corpus must be a path, an address or a list of them, got {corpus!r}")
    given = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    if not given:
        raise CorpusError("the corpus is no file at all; give one or more")
    for one in given:
        if not is_remote(str(one)):
            check_path("corpus", one, error=CorpusError)
    is_library = str(given[0]) == "stdlib" and len(given) == 1 and not Path("stdlib").exists()
    parts = [_library() if is_library else _find(one) for one in given]
    many = len(parts) > 1
    found = [
        (f"{number}/{name}" if many else name, place, part.folder)
        for number, part in enumerate(parts)
        for name, place in part.files.items()
    ]
    return Corpus(
        name=without_secrets(" ".join(map(str, given))),
        files=tuple(place for _, place, _ in found),
        names=tuple(name for name, _, _ in found),
        named=frozenset(place for _, place, folder in found if not folder),
        reader=READERS["python_source"] if is_library else None,
        options=ReadOptions(
            text_column=text_column,
            # Python's own tests hold sources that are broken on purpose.
            skip_invalid=skip_invalid or is_library,
            parse=parse,
            columns=columns,
            document_limit_mib=document_limit_mib,
            or_leave_out=or_leave_out,
        ),
    )


def _find(corpus: str | Path) -> _Part:
    """Find the files of one name."""
    shown_name = without_secrets(str(corpus))
    if is_remote(str(corpus)):
        found, folder = remote_files(str(corpus))
        shown = {
            name: file
            for name, file in found.items()
            if not any(part.startswith(".") for part in PurePosixPath(name).parts)
        }
        files: dict[str, Place] = dict(sorted(shown.items(), key=lambda one: _order(one[0])))
    else:
        path = Path(corpus)
        try:
            named, folder = path.is_file(), path.is_dir()
            paths = _visible_files(path) if folder else [path]
        except OSError as error:
            reason = error.strerror or error
            raise CorpusError(
                f"{printable(corpus)}: cannot be read: {reason}; give a path"
            ) from error
        if not (named or folder):
            raise CorpusError(f"no file or folder {printable(corpus)}; give a path, or `stdlib`")
        root = path if folder else path.parent
        files = {os.path.relpath(one, root): one for one in paths}
    if folder:
        files = without_descriptions(files, shown_name)
    if not files:
        raise CorpusError(
            f"{shown_name} is empty: it holds no files to read; give a folder of text"
        )
    return _Part(files, folder)


def _order(name: str) -> tuple[str, ...]:
    return PurePosixPath(name).parts


def _library() -> _Part:
    library = Path(sysconfig.get_path("stdlib"))
    return _Part({os.path.relpath(one, library): one for one in _library_files(library)}, True)


def _visible_files(folder: Path) -> list[Path]:
    """Find the files of a folder, links to folders last, so that files keep their own names."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        for place, folders, names in _walk(waiting.pop(0)):
            facts = os.stat(place)
            if (facts.st_dev, facts.st_ino) in seen:
                folders.clear()
                continue
            seen.add((facts.st_dev, facts.st_ino))
            inner = sorted(Path(place, name) for name in folders if not name.startswith("."))
            waiting += [path for path in inner if path.is_symlink()]
            folders[:] = [path.name for path in inner if not path.is_symlink()]
            found += [Path(place, name) for name in names if not name.startswith(".")]
    for path in found:
        if path.is_symlink() and not path.exists():
            raise CorpusError(f"{path}: a link to nothing; mend or remove it")
    return sorted(path for path in found if path.is_file())


def _walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk folders as `os.walk` does, which until Python 3.12 needs a stack as deep as they are."""
    waiting = [str(top)]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as found:
                entries = list(found)
        except OSError as error:
            raise CorpusError(
                f"{printable(place)}: cannot be read: {error.strerror}; move it higher up, or "
                "give it to this user to read"
            ) from error
        folders = [entry.name for entry in entries if entry.is_dir()]
        yield place, folders, [entry.name for entry in entries if not entry.is_dir()]
        waiting += [os.path.join(place, name) for name in folders]


def _library_files(library: Path) -> list[Path]:
    found = []
    for place, folders, names in _walk(library):
        folders[:] = [name for name in folders if name not in _LIBRARY_LEFT_OUT]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(found)
