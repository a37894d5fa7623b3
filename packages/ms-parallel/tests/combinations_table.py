"""The combinations that the oracle draws, as the table of `ms-parallel explain` and the docs.

python packages/ms-parallel/tests/combinations_table.py      # writes both
"""

import re
from pathlib import Path

import msgspec
from runs import tiny
from test_oracle import PARTS, drawn_jobs

from ms_parallel.cluster.layout import Layout
from ms_parallel.proof.combinations import TABLE, ProvedPairs, count_pairs, features_of, pair_name

PACKAGE = Path(__file__).parent.parent
PAGE = PACKAGE.parents[1] / "docs" / "parallel" / "proofs.md"
FILE = PACKAGE / "src" / "ms_parallel" / "proof" / TABLE
COLUMNS = ("data", "tensor", "pipeline", "context", "expert", "replicate")
BEGIN, END = "<!-- combinations: made by tests/combinations_table.py -->", "<!-- /combinations -->"


def counted() -> ProvedPairs:
    """The pairs of all that the oracle draws."""
    jobs = [job for part in range(PARTS) for job in drawn_jobs(part)]
    return count_pairs(
        features_of(Layout.parse(job["layout"]), tiny(**job["settings"]), job["options"])
        for job in jobs
    )


def encoded(found: ProvedPairs) -> bytes:
    """The file's content."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def table(found: ProvedPairs) -> str:
    """The table of the page, in Markdown."""
    features = {name for pair in found.pairs for name in pair.split(" x ")}
    rows = [*COLUMNS, *sorted(features - set(COLUMNS))]
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for row in rows:
        counts = [found.pairs.get(pair_name(row, column), 0) for column in COLUMNS]
        cells = [
            "" if row == column else str(count or "none")
            for column, count in zip(COLUMNS, counts, strict=True)
        ]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def between(text: str) -> str:
    """A text between the marks of the page."""
    return f"{BEGIN}\n{text}\n{END}"


def page_table(text: str) -> str:
    """The text between the marks of the page."""
    found = re.search(re.escape(between("WHOLE")).replace("WHOLE", "(.*?)"), text, re.DOTALL)
    assert found, f"{PAGE} has no marks of the table"
    return found[1]


if __name__ == "__main__":
    made = counted()
    FILE.write_bytes(encoded(made))
    old = PAGE.read_text()
    PAGE.write_text(old.replace(between(page_table(old)), between(table(made))))
