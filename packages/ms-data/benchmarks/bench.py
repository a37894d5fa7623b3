"""Benchmarks of ms-data: tokenize, write, verify, stream and resume on the standard library.

    nox -s "bench(ms-data)"        or, with the package installed,  python benchmarks/bench.py

Rates are per CPU second unless stated otherwise, which makes a busy machine matter less.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ms_data import TokenStream, build, inspect, train_tokenizer, verify
from ms_data.disk.split import Split
from ms_data.disk.writer import DatasetWriter
from ms_data.streams.order import Order

LENGTH = 1024


def measure_seconds(
    work: Callable[[], object], clock: Callable[[], float] = time.process_time
) -> float:
    """Return CPU seconds of one call, over all threads."""
    start = clock()
    work()
    return clock() - start


def median_rate(amount: float, work: Callable[[], object], rounds: int = 5) -> float:
    """Return the median amount per CPU second."""
    return statistics.median(amount / measure_seconds(work) for _ in range(rounds))


def measure_streaming(folder: Path, rounds: int) -> dict[str, int]:
    """Return sequences of 1,024 per CPU second with all four arrays, by batch size."""
    rates = {}
    for rows in (1, 8, 64, 512):
        stream = TokenStream(folder, sequence_length=LENGTH, batch_size=rows)
        count = max(1, stream.samples_per_epoch // rows)

        def epoch(stream: TokenStream = stream, count: int = count) -> None:
            for _ in range(count):
                next(stream)

        rates[f"{rows} rows"] = round(median_rate(count * rows, epoch, rounds))
    return rates


def measure_resuming(folder: Path) -> float:
    """Return milliseconds from opening to the first batch, at 90% of epoch 10**6."""
    stream = TokenStream(folder, sequence_length=LENGTH, batch_size=8)
    far = int((10**6 + 0.9) * stream.samples_per_epoch)
    state = stream.state_dict() | {"consumed_samples": far}

    def resume() -> None:
        resumed = TokenStream(folder, sequence_length=LENGTH, batch_size=8)
        resumed.load_state_dict(state)
        next(resumed)

    return statistics.median(measure_seconds(resume, time.perf_counter) for _ in range(9)) * 1000


def measure_writing(folder: Path, scratch: Path) -> float:
    """Return tokens per CPU second from memory to closed and synced shards."""
    split = Split(folder, "train")
    documents = np.split(split.read(0, split.tokens), split.all_ends()[:-1])

    def write() -> None:
        writer = DatasetWriter(
            scratch,
            token_type=split.index.token_type,
            frame_tokens=split.index.frame_tokens,
            shard_size_bytes=64 << 20,
        )
        for document in documents:
            writer.append("train", document)
        writer.close()

    return median_rate(split.tokens, write)


def main() -> None:
    """Print all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", default="stdlib", help="as for `ms-data build`")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards, scratch = folder / "shards", folder / "scratch"
        scratch.mkdir()
        training_s = measure_seconds(
            lambda: train_tokenizer(options.corpus, vocab_size=8192, out=folder / "t")
        )
        long_word_text = folder / "endless.txt"
        long_word_text.write_text("one two three. " * 50 + "x" * 200_000)
        long_word_s = measure_seconds(lambda: train_tokenizer(long_word_text, vocab_size=270))
        start, cpu = time.perf_counter(), time.process_time()
        summary = build(options.corpus, tokenizer=folder / "t", out=shards)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - start
        megabytes = summary.text_bytes / 1e6
        order = Order(samples=10**12, chunk_samples=128)
        figures = {
            "documents": summary.documents,
            "text, MB": round(megabytes, 1),
            "tokens": summary.tokens,
            "train tokenizer, CPU s": round(training_s, 1),
            "train on a word of 200,000 letters, CPU s": round(long_word_s, 1),
            "build, MB per CPU s": round(megabytes / cpu, 2),
            "build, MB per wall s": round(megabytes / wall, 2),
            "bytes per token on disk": round(summary.size_bytes / summary.tokens, 3),
            "write, million tokens per CPU s": round(measure_writing(shards, scratch) / 1e6, 1),
            "verify, MB of tokens per CPU s": round(
                median_rate(inspect(shards).splits["train"].tokens * 2e-6, lambda: verify(shards))
            ),
            "order of 10**12 samples, million indices per CPU s": round(
                median_rate(order.window_samples / 1e6, lambda: order.window(3, 10**8)), 1
            ),
            "stream, sequences per CPU s": measure_streaming(shards, options.rounds),
            "resume far away, wall ms to the first batch": round(measure_resuming(shards), 1),
            "peak memory of all this, MB": round(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            ),
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
