"""Gigabyte Parquet files are read and built in the memory of small ones."""

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
"""Documents of about 18 kB each: row groups of about 18 MB, as in published corpora."""
EXTRA_MEMORY_KIB = 64 << 10
"""Extra memory that a file of ten times the size may take; allocators cache a few batches."""

WORK = """
import json, re, sys, time
from ms_data import build
from ms_data.corpus.find import find_corpus
# ru_maxrss is inherited from the parent process.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
path, tokenizer, out, jobs = sys.argv[1:]
size = 0
start_s, start_cpu_s = time.monotonic(), time.process_time()
if out:
    size = build(path, tokenizer=tokenizer, out=out, shard="1/" + jobs).text_bytes
else:
    for document in find_corpus(path).documents():
        size += len(document.text)
print(json.dumps({"size": size, "peak_kib": peak(), "cpu_s": time.process_time() - start_cpu_s,
                  "wall_s": time.monotonic() - start_s}))
"""


def source_copies() -> Iterator[tuple[int, str]]:
    """Yield the standard library's sources repeatedly, with every fourth line unique per copy."""
    texts = [document.text for document in find_corpus("stdlib").documents()]
    for number in count():
        for text in texts:
            lines = text.split("\n")
            lines[::4] = [
                f"{line}  # {number * 7919 + index}" for index, line in enumerate(lines[::4])
            ]
            yield number, "\n".join(lines)


def write_table(path: Path, size_bytes: int) -> int:
    """Write zstd row groups until the file has this size; return the number of characters."""
    characters, rows = 0, []
    schema = pa.schema({"copy": pa.int64(), "text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for number, text in source_copies():
            rows.append({"copy": number, "text": text})
            characters += len(text)
            if len(rows) == ROW_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
                if path.stat().st_size >= size_bytes:
                    return characters
    raise AssertionError  # copies never run out


def run_in_subprocess(path: Path, tokenizer: Path, out: Path | None, jobs: int) -> dict[str, float]:
    """Read or partly build a file in a separate process; return sizes, times and peak memory."""
    command = [sys.executable, "-c", WORK, path, tokenizer, out or "", str(jobs)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(completed.stdout)
    return result


@pytest.mark.parametrize(
    "mib", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_file_of_ten_times_the_size_takes_no_more_memory(tmp_path: Path, mib: int) -> None:
    """Files of 2 and 20 MiB, or 0.2 and 2 GiB, are read completely and built as one array job.

    The job reads the complete file and tokenizes the same amount of the large and the small one.
    """
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(Path(json.__file__).parent, vocab_size=512, out=tokenizer)
    peaks: dict[str, list[float]] = {"read": [], "built": []}
    for times in (1, 10):
        path = tmp_path / f"{times}.parquet"
        characters = write_table(path, times * mib << 20)
        read = run_in_subprocess(path, tokenizer, None, 1)
        assert read["size"] == characters
        built = run_in_subprocess(path, tokenizer, tmp_path / f"out{times}", 2 * times)
        assert built["size"] > 0.3 * characters / (2 * times)
        peaks["read"].append(read["peak_kib"])
        peaks["built"].append(built["peak_kib"])
        groups = pq.ParquetFile(path).num_row_groups
        print(f"{path.stat().st_size >> 20} MiB, {groups} row groups: {read} {built}")  # noqa: T201
        path.unlink()
    for small, large in peaks.values():
        assert large < small + EXTRA_MEMORY_KIB, peaks
