"""A Parquet file of gigabytes is read and built in the memory of a small one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ms_data import train_tokenizer
from ms_data.corpus.find import find_corpus

ROW_GROUP = 1000
"""Documents, of some 18 kB each: row groups of some 18 MB, as published corpora have them."""
GROWN_KIB = 64 << 10
"""How much more memory a file of ten times the size may take: allocators keep a few batches."""

WORK = """
import json, re, sys, time
from ms_data import build
from ms_data.corpus.find import find_corpus
# ru_maxrss begins with that of the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
path, tokenizer, out, jobs = sys.argv[1:]
size = 0
began, spent = time.monotonic(), time.process_time()
if out:
    size = build(path, tokenizer=tokenizer, out=out, shard="1/" + jobs).text_bytes
else:
    for one in find_corpus(path).documents():
        size += len(one.text)
print(json.dumps({"size": size, "peak_kib": peak(), "cpu_s": time.process_time() - spent,
                  "wall_s": time.monotonic() - began}))
"""


def copies() -> Iterator[tuple[int, str]]:
    """The running Python's own sources over and over, each line of each copy another one."""
    texts = [one.text for one in find_corpus("stdlib").documents()]
    for number in count():
        for text in texts:
            lines = text.split("\n")
            lines[::4] = [f"{line}  # {number * 7919 + at}" for at, line in enumerate(lines[::4])]
            yield number, "\n".join(lines)


def write_table(path: Path, size_bytes: int) -> int:
    """Writes row groups by zstd until the file has so many bytes; returns its characters."""
    characters, rows = 0, []
    schema = pa.schema({"copy": pa.int64(), "text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for number, text in copies():
            rows.append({"copy": number, "text": text})
            characters += len(text)
            if len(rows) == ROW_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
                if path.stat().st_size >= size_bytes:
                    return characters
    raise AssertionError  # there is always one more copy


def done_apart(path: Path, tokenizer: Path, out: Path | None, jobs: int) -> dict[str, float]:
    """What a process of its own reads, or builds a part of, and its highest memory."""
    command = [sys.executable, "-c", WORK, path, tokenizer, out or "", str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "mib", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_ten_times_the_file_takes_no_more_memory(tmp_path: Path, mib: int) -> None:
    """Files of 2 and 20 MiB, or 0.2 and 2 GiB by zstd: read whole, and built as one array job.

    Such a job reads the whole file and tokenizes as much of the large one as of the small one.
    """
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(Path(json.__file__).parent, vocab_size=512, out=tokenizer)
    peaks: dict[str, list[float]] = {"read": [], "built": []}
    for times in (1, 10):
        path = tmp_path / f"{times}.parquet"
        characters = write_table(path, times * mib << 20)
        read = done_apart(path, tokenizer, None, 1)
        assert read["size"] == characters
        built = done_apart(path, tokenizer, tmp_path / f"out{times}", 2 * times)
        assert built["size"] > 0.3 * characters / (2 * times)
        peaks["read"].append(read["peak_kib"])
        peaks["built"].append(built["peak_kib"])
        groups = pq.ParquetFile(path).num_row_groups
        print(f"{path.stat().st_size >> 20} MiB, {groups} row groups: {read} {built}")  # noqa: T201
        path.unlink()
    for small, large in peaks.values():
        assert large < small + GROWN_KIB, peaks
