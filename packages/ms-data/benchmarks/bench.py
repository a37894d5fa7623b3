"""Our own figures: tokenize, write, verify, stream and resume the standard library's sources.

    nox -s "bench(ms-data)"        or, with the package installed,  python benchmarks/bench.py

Rates are per CPU second unless their name says otherwise, so that a busy machine matters less.
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


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """CPU seconds of one call, all threads together."""
    began = clock()
    work()
    return clock() - began


def median_rate(amount: float, work: Callable[[], object], rounds: int = 5) -> float:
    """Median amount a CPU second."""
    return statistics.median(amount / seconds(work) for _ in range(rounds))


def streaming(folder: Path, rounds: int) -> dict[str, int]:
    """Sequences of 1,024 a CPU second, all four arrays, by rows in a batch."""
    rates = {}
    for rows in (1, 8, 64, 512):
        stream = TokenStream(folder, sequence_length=LENGTH, batch_size=rows)
        count = max(1, stream.samples_per_epoch // rows)

        def epoch(stream: TokenStream = stream, count: int = count) -> None:
            for _ in range(count):
                next(stream)

        rates[f"{rows} rows"] = round(median_rate(count * rows, epoch, rounds))
    return rates


def resuming(folder: Path) -> float:
    """Milliseconds from opening to the first batch, at nine tenths of the epoch numbered 10**6."""
    stream = TokenStream(folder, sequence_length=LENGTH, batch_size=8)
    far = int((10**6 + 0.9) * stream.samples_per_epoch)
    state = stream.state_dict() | {"consumed_samples": far}

    def resume() -> None:
        again = TokenStream(folder, sequence_length=LENGTH, batch_size=8)
        again.load_state_dict(state)
        next(again)

    return statistics.median(seconds(resume, time.perf_counter) for _ in range(9)) * 1000


def writing(folder: Path, scratch: Path) -> float:
    """Tokens a CPU second from memory to a closed, synced shard."""
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
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", default="stdlib", help="as for `ms-data build`")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        shards, scratch = place / "shards", place / "scratch"
        scratch.mkdir()
        trained = seconds(lambda: train_tokenizer(options.corpus, vocab_size=8192, out=place / "t"))
        endless = place / "endless.txt"
        endless.write_text("one two three. " * 50 + "x" * 200_000)
        one_word = seconds(lambda: train_tokenizer(endless, vocab_size=270))
        began, cpu = time.perf_counter(), time.process_time()
        summary = build(options.corpus, tokenizer=place / "t", out=shards)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        megabytes = summary.text_bytes / 1e6
        order = Order(samples=10**12, chunk_samples=128)
        figures = {
            "documents": summary.documents,
            "text, MB": round(megabytes, 1),
            "tokens": summary.tokens,
            "train tokenizer, CPU s": round(trained, 1),
            "train on a word of 200,000 letters, CPU s": round(one_word, 1),
            "build, MB a CPU s": round(megabytes / cpu, 2),
            "build, MB a wall s": round(megabytes / wall, 2),
            "bytes a token on disk": round(summary.size_bytes / summary.tokens, 3),
            "write, million tokens a CPU s": round(writing(shards, scratch) / 1e6, 1),
            "verify, MB of tokens a CPU s": round(
                median_rate(inspect(shards).splits["train"].tokens * 2e-6, lambda: verify(shards))
            ),
            "order of 10**12 samples, million indices a CPU s": round(
                median_rate(order.window_samples / 1e6, lambda: order.window(3, 10**8)), 1
            ),
            "stream, sequences a CPU s": streaming(shards, options.rounds),
            "resume far away, wall ms to the first batch": round(resuming(shards), 1),
            "peak memory of all this, MB": round(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            ),
        }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
