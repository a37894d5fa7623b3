"""Times reading and building from Parquet beside JSON Lines and plain pyarrow, in turns.

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


def ours(path: Path) -> int:
    """Characters that `find_corpus` reads."""
    return sum(len(one.text) for one in find_corpus(path).documents())


def plain(path: Path) -> int:
    """Characters that a loop over pyarrow's batches reads."""
    batches = pq.ParquetFile(path).iter_batches(columns=["text"])
    return sum(len(text) for batch in batches for text in batch.column(0).to_pylist())


def timed(work: Callable[[], object]) -> float:
    """Processor seconds of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Writes the corpus in both forms, reads each in turns, then builds from each in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = [one.text for one in find_corpus("stdlib").documents()]
        size = sum(len(text.encode()) for text in texts) / 1e6
        lines, parquet = folder / "a.jsonl", folder / "a.parquet"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        pq.write_table(table({"text": texts}), parquet, compression="zstd")
        tokenizer = train_tokenizer(lines, vocab_size=8192)
        assert ours(lines) == ours(parquet) == plain(parquet)

        def built(path: Path) -> None:
            number = len(list(folder.iterdir()))
            build(path, tokenizer=tokenizer, out=folder / f"out{number}")

        works: dict[str, Callable[[], object]] = {
            "read JSON Lines": lambda: ours(lines),
            "read Parquet": lambda: ours(parquet),
            "plain pyarrow": lambda: plain(parquet),
            "build from JSON Lines": lambda: built(lines),
            "build from Parquet": lambda: built(parquet),
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                times[name].append(timed(work))
        for name, found in times.items():
            print(f"{name:24} {size / median(found):8.1f} MB of text a CPU s")


if __name__ == "__main__":
    main()
