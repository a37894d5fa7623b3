"""SQLite databases of profilers, read into the same columns as a trace's JSON.

A vendor declares its tables and the module that reads them (`Vendor.database_tables`,
`database_reader`); that module's `records` yields trace events.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

from ms_profile.errors import TraceError
from ms_profile.files.untrusted import open_file
from ms_profile.trace.builder import TraceBuilder
from ms_profile.trace.columns import Trace
from ms_profile.trace.records import MAX_NS, TraceEvent
from ms_profile.vendors import VENDORS

MAGIC: Final = b"SQLite format 3\0"
MAX_TEXT_BYTES: Final = 1 << 24
CHUNK_ROWS: Final = 1 << 15
Row = tuple[Any, ...]


class Records(Protocol):
    """Reader of one vendor's databases."""

    def __call__(self, database: "Database", header: dict[str, Any], /) -> Iterator[TraceEvent]:
        """Yield the events, and add the rank and clock to the header as Kineto's JSON does."""


class Database:
    """A profiler's database, opened read-only, whose schema cannot run code.

    Views, virtual tables and generated columns could contain any query, so only plain tables and
    columns are read, with one scan per table.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.base_ns = 0
        """Origin of the times that `span` returns; far from it, float microseconds lose digits."""
        self.skipped = 0
        """Number of rows with impossible values."""
        self._connection = connection
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        ).fetchall()
        self._columns = {
            str(name): {
                str(row[1]) for row in connection.execute("SELECT * FROM pragma_table_xinfo(?)",
                                                          (name,)) if not row[6]
            }
            for (name,) in tables
        }  # fmt: skip

    def __contains__(self, table: str) -> bool:
        return table in self._columns

    def rows(self, table: str, *columns: str) -> Iterator[Row]:
        """Yield rows in file order; columns that this version lacks are None."""
        table_columns = self._columns.get(table)
        if not table_columns:
            return
        names = [f'"{name}"' if name in table_columns else "NULL" for name in columns]
        yield from self._connection.execute(f'SELECT {", ".join(names)} FROM "{table}"')

    def texts(self, table: str) -> dict[int, str]:
        """Return a string table (id, value) as a dict."""
        return {
            key: text for key, text in self.rows(table, "id", "value")
            if isinstance(key, int) and isinstance(text, str)
        }  # fmt: skip

    def span(self, start: object, end: object) -> tuple[float, float] | None:
        """Convert ns to (start after the origin, duration) in µs; None for impossible times."""
        begin, stop = nanoseconds(start), nanoseconds(end)
        if begin is None or stop is None or not 0 <= stop - begin <= MAX_NS:
            self.skipped += 1
            return None
        return (begin - self.base_ns) / 1000, (stop - begin) / 1000


def nanoseconds(value: object) -> int | None:
    """Parse a time in ns, which some versions write as text; None if it is not an integer."""
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        value = int(value)
    return value if isinstance(value, int) and -MAX_NS <= value <= MAX_NS else None


def is_database(path: Path) -> bool:
    """Return True if the file starts with SQLite's magic bytes."""
    with open_file(path, error=TraceError) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_database(path: Path) -> Trace:
    """Read a profiler's database.

    Raises:
        TraceError: the file is damaged, or is not the database of a known profiler.
    """
    # immutable: no lock or journal next to the file, which may be on a read-only disk.
    uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT_BYTES)
            connection.text_factory = lambda text: text.decode(errors="replace")
            return _read(Database(path, connection))
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path} is a damaged SQLite database ({error}); export it again"
        ) from error


def _read(database: Database) -> Trace:
    path = database.path
    vendor = next(
        (item for item in VENDORS if any(table in database for table in item.database_tables)), None
    )
    if vendor is None:
        tables = ", ".join(item.database_tables[0] for item in VENDORS if item.database_tables)
        raise TraceError(
            f"{path} must be a profiler's database with a table such as {tables}; pass the output "
            "of `nsys export --type sqlite`, or a database of the Ascend profiler other than "
            "analysis.db, which has no events"
        )
    records: Records = import_module(vendor.database_reader).records
    header: dict[str, Any] = {}
    builder = TraceBuilder()
    for chunk in _chunks(records(database, header)):
        builder.add(chunk)
    warnings: list[str] = header.pop("warnings", [])
    size = path.stat().st_size
    return builder.finish(header, warnings, size, damaged=database.skipped, name=path.name)


def _chunks(events: Iterable[TraceEvent]) -> Iterator[Sequence[TraceEvent]]:
    iterator = iter(events)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        yield chunk
