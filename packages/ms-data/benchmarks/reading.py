"""Time reading and building from Parquet, from JSON Lines and with plain pyarrow, alternating.

python packages/ms-data/benchmarks/reading.py
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq
from pyarrow import table

from ms_data import build, train_tokenizer
from ms_data.corpus.find import find_corpus


def read_with_ms_data(path: Path) -> int:
    """Count the characters that `find_corpus` reads."""
    return sum(len(document.text) for document in find_corpus(path).documents())


def read_with_pyarrow(path: Path) -> int:
    """Count the characters that a loop over pyarrow's batches reads."""
    batches = pq.ParquetFile(path).iter_batches(columns=["text"])
    return sum(len(text) for batch in batches for text in batch.column(0).to_pylist())


def cpu_s(work: Callable[[], object]) -> float:
    """Return CPU seconds of one call, over all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Write the corpus in both formats, then time reading and building, alternating."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        texts = [document.text for document in find_corpus("stdlib").documents()]
        size = sum(len(text.encode()) for text in texts) / 1e6
        lines, parquet = folder / "a.jsonl", folder / "a.parquet"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        pq.write_table(table({"text": texts}), parquet, compression="zstd")
        tokenizer = train_tokenizer(lines, vocab_size=8192)
        assert read_with_ms_data(lines) == read_with_ms_data(parquet) == read_with_pyarrow(parquet)

        def build_from(path: Path) -> None:
            number = len(list(folder.iterdir()))
            build(path, tokenizer=tokenizer, out=folder / f"out{number}")

        tasks: dict[str, Callable[[], object]] = {
            "read JSON Lines": lambda: read_with_ms_data(lines),
            "read Parquet": lambda: read_with_ms_data(parquet),
            "plain pyarrow": lambda: read_with_pyarrow(parquet),
            "build from JSON Lines": lambda: build_from(lines),
            "build from Parquet": lambda: build_from(parquet),
        }
        times: dict[str, list[float]] = {name: [] for name in tasks}
        for _ in range(rounds):
            for name, work in tasks.items():
                times[name].append(cpu_s(work))
        for name, seconds in times.items():
            print(f"{name:24} {size / median(seconds):8.1f} MB of text per CPU s")


if __name__ == "__main__":
    main()
