"""Reads Lance datasets, one batch of rows at a time.

A Lance dataset is a folder with data files, indexes, deleted rows and one manifest per version. The
corpus lists only the newest manifest, through which this reader opens the dataset.
"""

from collections.abc import Iterator
from pathlib import Path

from ms_data.corpus.reader import Invalid, OpenFile, ReadOptions, ReadResult, import_library
from ms_data.corpus.tables import batch_documents, column_problem, guarded_pyarrow
from ms_data.errors import CorpusError

VERSIONS, SUFFIX = "_versions", ".manifest"
BATCH_ROWS = 1024


class _LanceReader:
    """Reader of Lance manifests, which contain NUL bytes, unlike text."""

    def claims(self, name: str, head: bytes, /) -> bool:
        return name.endswith(SUFFIX) and b"\0" in head

    def documents(
        self, file: OpenFile, options: ReadOptions, start: int, /
    ) -> Iterator[ReadResult]:
        if not isinstance(file.path, Path) or file.path.parent.name != VERSIONS:
            raise CorpusError(
                f"{file.path}: a Lance manifest must be in its dataset's folder on this machine;"
                " copy the folder and pass it"
            )
        folder = file.path.parent.parent
        lance = import_library("lance", "lance", file)
        with guarded_pyarrow(file, "Lance dataset", "lance") as arrow:
            dataset = lance.dataset(str(folder))
            problem = column_problem(arrow, dataset.schema, options)
            if problem:
                yield Invalid(f"{folder}: {problem}")
                return
            total = max(1, dataset.count_rows())
            # In storage order, so that `start` refers to the same row in every run.
            batches = dataset.scanner(
                columns=None if options.rows else [options.text_column],
                batch_size=BATCH_ROWS,
                offset=start or None,
                scan_in_order=True,
            ).to_batches()
            first = start
            for batch in batches:
                yield from batch_documents(arrow, batch, file, options, first + 1)
                first += batch.num_rows
                file.done_bytes = file.size_bytes * first // total


def newest_manifests(names: list[str]) -> dict[str, str]:
    """Return the newest manifest of each Lance dataset, by the dataset's folder.

    The manifest of version N is `N.manifest`, or in newer datasets 2^64 - 1 - N with 20 digits, so
    that the newest sorts first.
    """
    newest: dict[str, tuple[int, str]] = {}
    for name in names:
        folder, _, manifest = name.rpartition(f"{VERSIONS}/")
        digits = manifest.removesuffix(SUFFIX)
        if not manifest.endswith(SUFFIX) or not digits.isdigit() or (folder and folder[-1] != "/"):
            continue
        version = 2**64 - 1 - int(digits) if len(digits) == 20 else int(digits)
        if version >= newest.get(folder, (0, ""))[0]:
            newest[folder] = version, name
    return {folder: name for folder, (_, name) in newest.items()}


READER = _LanceReader()
