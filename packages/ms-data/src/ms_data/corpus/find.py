"""Finds the files of a corpus by what the user typed."""

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

from ms_data.corpus.corpus import Corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB, ReadOptions
from ms_data.corpus.readers import READERS
from ms_data.errors import CorpusError, printable
from ms_data.files.untrusted import check_path

_LIBRARY_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


def find_corpus(
    corpus: str | Path,
    *,
    text_key: str = "text",
    skip_invalid: bool = False,
    parse: Callable[[bytes], str] | None = None,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
) -> Corpus:
    """Finds the files of a corpus: a file, a folder of files, or `stdlib`.

    Files that end in .jsonl or .ndjson hold a document a line, any other file is one document;
    both may be packed by gzip (.gz) or zstd (.zst). A folder is read in the order of its files'
    names, hidden ones left out and links followed, each folder once; files that are no text
    (archives, pictures, programs, whatever holds NUL bytes) are left out when they are read.
    `stdlib` means the running Python's own library sources.

    Raises:
        SettingError: the limit is below 1.
        CorpusError: there is no such place, no file in it, or a link to nothing.
    """
    check_path("corpus", corpus, error=CorpusError)
    path, library = Path(corpus), Path(sysconfig.get_path("stdlib"))
    try:
        is_library = str(corpus) == "stdlib" and not path.exists()
        named, folder = path.is_file(), path.is_dir()
        files = (
            _library_files(library) if is_library else _visible_files(path) if folder else [path]
        )
    except OSError as error:
        reason = error.strerror or error
        raise CorpusError(f"{printable(corpus)}: cannot be read: {reason}; give a path") from error
    if not (is_library or named or folder):
        raise CorpusError(f"no file or folder {printable(corpus)}; give a path, or `stdlib`")
    if not files:
        raise CorpusError(f"{corpus} is empty: it holds no files to read; give a folder of text")
    return Corpus(
        name=str(corpus),
        files=tuple(files),
        root=library if is_library else path if folder else path.parent,
        reader=READERS["python_source"] if is_library else None,
        options=ReadOptions(
            text_key=text_key,
            # Python's own tests hold sources that are broken on purpose.
            skip_invalid=skip_invalid or is_library,
            parse=parse,
            document_limit_mib=document_limit_mib,
            named=named,
        ),
    )


def _visible_files(folder: Path) -> list[Path]:
    """Finds the files of a folder, links to folders last, so that files keep their own names."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        for place, folders, names in os.walk(waiting.pop(0), onerror=_refuse):
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


def _refuse(error: OSError) -> None:
    raise CorpusError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _library_files(library: Path) -> list[Path]:
    found = []
    for place, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _LIBRARY_LEFT_OUT]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(found)
