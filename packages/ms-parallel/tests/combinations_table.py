"""Tables of the combinations in `test_oracle.py`, for `ms-parallel explain` and the docs.

python packages/ms-parallel/tests/combinations_table.py      # writes both
"""

import re
from pathlib import Path

import msgspec
from runs import tiny
from test_oracle import PARTS, random_jobs

from ms_parallel.cluster.layout import Layout
from ms_parallel.proof.combinations import TABLE, ProvedPairs, count_pairs, features_of, pair_name

PACKAGE = Path(__file__).parent.parent
PAGE = PACKAGE.parents[1] / "docs" / "parallel" / "proofs.md"
FILE = PACKAGE / "src" / "ms_parallel" / "proof" / TABLE
COLUMNS = ("data", "tensor", "pipeline", "context", "expert", "replicate")
BEGIN, END = "<!-- combinations: made by tests/combinations_table.py -->", "<!-- /combinations -->"


def count_all_pairs() -> ProvedPairs:
    """Pairs of features in all random jobs."""
    jobs = [job for part in range(PARTS) for job in random_jobs(part)]
    return count_pairs(
        features_of(Layout.parse(job["layout"]), tiny(**job["settings"]), job["options"])
        for job in jobs
    )


def encode(pairs: ProvedPairs) -> bytes:
    """Content of the file."""
    return msgspec.json.format(msgspec.json.encode(pairs), indent=1) + b"\n"


def table(proved: ProvedPairs) -> str:
    """Table of the page in Markdown."""
    features = {name for pair in proved.pairs for name in pair.split(" x ")}
    rows = [*COLUMNS, *sorted(features - set(COLUMNS))]
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for row in rows:
        counts = [proved.pairs.get(pair_name(row, column), 0) for column in COLUMNS]
        cells = [
            "" if row == column else str(count or "none")
            for column, count in zip(COLUMNS, counts, strict=True)
        ]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def between(text: str) -> str:
    """A text between the markers of the page."""
    return f"{BEGIN}\n{text}\n{END}"


def page_table(text: str) -> str:
    """The text between the markers of the page."""
    match = re.search(re.escape(between("TABLE")).replace("TABLE", "(.*?)"), text, re.DOTALL)
    assert match, f"{PAGE} has no markers of the table"
    return match[1]


if __name__ == "__main__":
    proved_pairs = count_all_pairs()
    FILE.write_bytes(encode(proved_pairs))
    old = PAGE.read_text()
    PAGE.write_text(old.replace(between(page_table(old)), between(table(proved_pairs))))
