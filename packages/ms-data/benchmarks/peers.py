"""Read one corpus with ms-data and other loaders: check equal output, then time them alternately.

The work: every sequence of 1,024 tokens once, shuffled, in batches of 64 as new int64 arrays:
`tokens`, and `targets` shifted by one with -100 at document ends. Every contender gets the same
loop, one process without workers, a warm page cache and its own default shuffle. The run stops if a
contender's sequences are not exactly those of the corpus.

    nox -s "peers(ms-data)"        or, with the packages installed,  python benchmarks/peers.py
"""

import argparse
import atexit
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from ms_data import TokenStream, build, train_tokenizer
from ms_data.disk.split import Split

# streaming imports its vision module, which needs a torchvision build that matches torch and is
# not used here.
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

LENGTH, BATCH, MIN_EPOCHS_S = 1024, 64, 0.3
READERS = 4
SHARED = "/dev/shm"
Array = np.ndarray[Any, np.dtype[Any]]
Batches = Iterator[tuple[Array, ...]]


class Corpus:
    """The tokens of all documents, concatenated."""

    def __init__(self, folder: Path, name: str) -> None:
        tokenizer = train_tokenizer(name, vocab_size=8192)
        build(name, tokenizer=tokenizer, out=folder / "ours")
        split = Split(folder / "ours", "train")
        self.folder, self.end = folder, tokenizer.end_of_text
        self.tokens, self.ends = split.read(0, split.tokens), split.all_ends()
        self.samples = (len(self.tokens) - 1) // LENGTH
        self.by_megatron = self.tokens
        """The same documents in Megatron's order."""

    def sample(self, number: int) -> Array:
        """Return the tokens of one sequence and the token after it."""
        return self.tokens[number * LENGTH : (number + 1) * LENGTH + 1]


def batched(samples: Iterator[Array], end: int) -> Batches:
    """Collect single sequences of LENGTH + 1 tokens into batches, copying each once."""
    done = False
    while not done:
        tokens = np.empty((BATCH, LENGTH), np.int64)
        targets = np.empty((BATCH, LENGTH), np.int64)
        filled = 0
        for sample in samples:
            tokens[filled], targets[filled] = sample[:-1], sample[1:]
            filled += 1
            if filled == BATCH:
                break
        else:
            done = True
        if filled:
            tokens, targets = tokens[:filled], targets[:filled]
            targets[tokens == end] = -100
            yield tokens, targets


def ms_data(corpus: Corpus, cache_mib: int = 64) -> Callable[[], Batches]:
    """Read with TokenStream, which also yields positions and documents and verifies every frame."""
    stream = TokenStream(
        corpus.folder / "ours", sequence_length=LENGTH, batch_size=BATCH, cache_mib=cache_mib
    )

    def epoch() -> Batches:
        remaining = stream.samples_per_epoch
        for batch in stream:
            count = min(remaining, BATCH)
            yield tuple(value[:count] for value in batch.values())  # type: ignore[attr-defined]
            remaining -= count
            if not remaining:
                # Start the next epoch at its first sample, like the other contenders.
                epochs = stream.epoch + (stream.consumed_samples % stream.samples_per_epoch > 0)
                consumed = epochs * stream.samples_per_epoch
                stream.load_state_dict(stream.state_dict() | {"consumed_samples": consumed})
                return

    return epoch


def ms_data_uncached(corpus: Corpus) -> Callable[[], Batches]:
    """Read with TokenStream without a cache: every epoch decompresses and verifies every frame."""
    return ms_data(corpus, cache_mib=0)


def ms_data_separate_caches(corpus: Corpus) -> Callable[[], Batches]:
    """Read with four ranks that each decompress all frames."""
    return ms_data_shared_cache(corpus, share=False)


def ms_data_shared_cache(corpus: Corpus, share: bool = True) -> Callable[[], Batches]:
    """Read with four ranks that share a cache, which is empty when an epoch starts."""
    folder = Path(tempfile.mkdtemp(dir=SHARED, prefix="ms-data-peers-"))
    atexit.register(shutil.rmtree, folder)
    readers = [
        TokenStream(
            corpus.folder / "ours",
            sequence_length=LENGTH,
            batch_size=READERS * BATCH,
            place=SimpleNamespace(rank=rank, count=READERS),
            shared_cache=folder if share else None,
            cache_mib=64 if share else 0,
        )
        for rank in range(READERS)
    ]

    def epoch() -> Batches:
        for file in folder.iterdir():
            os.truncate(file, 0)
        remaining = samples = readers[0].samples_per_epoch
        start = -(-readers[0].consumed_samples // samples) * samples
        for reader in readers:
            reader.load_state_dict(reader.state_dict() | {"consumed_samples": start})
        while remaining:
            for reader in readers:
                count = min(remaining, BATCH)
                values: Any = next(reader).values()
                yield tuple(value[:count] for value in values)
                remaining -= count

    return epoch


def raw_file(corpus: Corpus) -> Array:
    """Return all tokens as one memory-mapped file."""
    path = corpus.folder / "raw.bin"
    corpus.tokens.tofile(path)
    return np.memmap(path, corpus.tokens.dtype, "r")


def memmap(corpus: Corpus) -> Callable[[], Batches]:
    """Lower bound: slices of one raw file in a permuted order."""
    mapped = raw_file(corpus)
    rng = np.random.default_rng(0)

    def epoch() -> Batches:
        order = rng.permutation(corpus.samples).tolist()
        samples = (mapped[index * LENGTH : (index + 1) * LENGTH + 1] for index in order)
        return batched(samples, corpus.end)

    return epoch


def memmap_all(corpus: Corpus) -> Callable[[], Batches]:
    """Add positions and documents to np.memmap with np.searchsorted in the document ends."""
    mapped = raw_file(corpus)
    document_starts = np.concatenate(([0], corpus.ends))
    rng = np.random.default_rng(0)

    def epoch() -> Batches:
        order = rng.permutation(corpus.samples)
        samples = (mapped[index * LENGTH : (index + 1) * LENGTH + 1] for index in order.tolist())
        for start, (tokens, targets) in enumerate(batched(samples, corpus.end)):
            token_index = order[start * BATCH : start * BATCH + len(tokens), None] * LENGTH
            token_index = token_index + np.arange(LENGTH)
            document = np.searchsorted(corpus.ends, token_index, side="right")
            start_index = np.maximum(document_starts[document], token_index[:, :1])
            yield (
                tokens,
                targets,
                token_index - start_index,
                (document - document[:, :1]).astype("i4"),
            )

    return epoch


def megatron(corpus: Corpus, **flags: bool) -> Callable[[], Batches]:
    """Megatron-core's GPTDataset without attention mask, with documents in its own order."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split as MegatronSplit

    prefix = str(corpus.folder / "megatron")
    if not Path(prefix + ".idx").exists():
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
        for document in np.split(corpus.tokens, corpus.ends[:-1]):
            builder.add_document(document, [len(document)])
        builder.finalize(prefix + ".idx")

    class Tokenizer:
        eod, pad, vocab_size = corpus.end, -1, 8192
        unique_identifiers = {"class": "fixed"}  # noqa: RUF012 - must be JSON

    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=LENGTH,
        split="1,0,0",
        path_to_cache=str(corpus.folder / "megatron-cache"),
        tokenizer=Tokenizer(),
        **(
            {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
            | {"create_attention_mask": False}
            | flags
        ),
    )
    low = GPTDataset.build_low_level_dataset(prefix, config)
    everything = np.arange(len(corpus.ends), dtype=np.int32)
    dataset = GPTDataset(low, prefix, everything, None, MegatronSplit.train, config)
    documents = np.split(corpus.tokens, corpus.ends[:-1])
    corpus.by_megatron = np.concatenate([documents[at] for at in dataset.document_index])

    def samples() -> Iterator[tuple[Array, Array]]:
        for number in range(len(dataset)):
            sample = dataset[number]
            yield sample["tokens"].numpy(), sample["labels"].numpy()

    def epoch() -> Batches:
        rows = samples()
        while batch := list(islice(rows, BATCH)):
            tokens = np.stack([row[0] for row in batch])
            targets = np.stack([row[1] for row in batch])
            targets[tokens == corpus.end] = -100
            yield tokens, targets

    return epoch


def mds(corpus: Corpus, compression: str | None = None) -> Callable[[], Batches]:
    """mosaicml-streaming: one sample per sequence, without its optional hashes."""
    from streaming import MDSWriter, StreamingDataset

    folder = str(corpus.folder / f"mds-{compression}")
    columns = {"tokens": f"ndarray:uint16:{LENGTH + 1}"}
    with MDSWriter(out=folder, columns=columns, compression=compression) as writer:
        for number in range(corpus.samples):
            writer.write({"tokens": corpus.sample(number)})
    dataset = StreamingDataset(local=folder, shuffle=True, batch_size=1, keep_zip=True)
    return lambda: batched((sample["tokens"] for sample in dataset), corpus.end)


def mds_zstd(corpus: Corpus) -> Callable[[], Batches]:
    """mosaicml-streaming with zstd-3; decompressed files stay on disk after the first epoch."""
    return mds(corpus, "zstd:3")


def litdata(corpus: Corpus) -> Callable[[], Batches]:
    """LitData with its token loader, one block per sequence, uncompressed."""
    import torch
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    folder = str(corpus.folder / "litdata")
    loader = TokensLoader(block_size=LENGTH + 1)
    writer = BinaryWriter(folder, chunk_bytes="64MB", item_loader=loader)
    for number in range(corpus.samples):
        writer[number] = torch.from_numpy(corpus.sample(number).copy())
    writer.done()
    writer.merge()

    def epoch() -> Batches:
        dataset = StreamingDataset(
            folder, item_loader=TokensLoader(block_size=LENGTH + 1), shuffle=True
        )
        return batched((sample.numpy() for sample in dataset), corpus.end)

    return epoch


def digests(batches: Batches, columns: int) -> Counter[int]:
    """Count the sequences of an epoch by their checksum."""
    counts: Counter[int] = Counter()
    for batch in batches:
        assert all(column.dtype == np.int64 for column in batch[:2])
        for row in zip(*batch[:columns], strict=True):
            counts[xxhash.xxh3_64_intdigest(b"".join(column.tobytes() for column in row))] += 1
    return counts


def expected(corpus: Corpus, tokens: Array) -> Counter[int]:
    """Return the same counts, cut directly from the concatenated documents."""
    counts: Counter[int] = Counter()
    for start in range(0, corpus.samples * LENGTH, LENGTH):
        row = tokens[start : start + LENGTH + 1].astype(np.int64)
        targets = np.where(row[:-1] == corpus.end, -100, row[1:])
        counts[xxhash.xxh3_64_intdigest(row[:-1].tobytes() + targets.tobytes())] += 1
    return counts


def rate(epoch: Callable[[], Batches]) -> tuple[float, float]:
    """Return sequences per CPU and per wall second, over full epochs of at least MIN_EPOCHS_S."""
    count, cpu, wall = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < MIN_EPOCHS_S:
        count += sum(len(batch[0]) for batch in epoch())
    return count / (time.process_time() - cpu), count / (time.perf_counter() - wall)


PLAIN = {
    "ms-data": ms_data,
    "ms-data, no cache": ms_data_uncached,
    "ms-data, first epoch of 4 local ranks, shared cache": ms_data_shared_cache,
    "ms-data, first epoch of 4 local ranks, separate caches": ms_data_separate_caches,
    "np.memmap": memmap,
    "litdata": litdata,
    "Megatron GPTDataset": megatron,
    "MDS": mds,
    "MDS zstd-3": mds_zstd,
}
WITH_DOCUMENTS = {
    "ms-data": ms_data,
    "ms-data, no cache": ms_data_uncached,
    "np.memmap + searchsorted": memmap_all,
}


def compare(corpus: Corpus, contenders: dict[str, Any], columns: int, rounds: int) -> Any:
    """Check that outputs are equal, time alternately, and return medians and ratios."""
    epochs = {name: build(corpus) for name, build in contenders.items()}
    reference = expected(corpus, corpus.tokens) if columns == 2 else digests(ms_data(corpus)(), 4)
    for name, epoch in epochs.items():
        wanted_counts = expected(corpus, corpus.by_megatron) if "Megatron" in name else reference
        actual = digests(epoch(), columns)
        # ms-data also yields the last sequence if the corpus length is an exact multiple.
        if sum((wanted_counts - actual).values()) or sum((actual - wanted_counts).values()) > 1:
            sys.exit(
                f"{name} does not yield the corpus: missing {len(wanted_counts - actual)} sequences"
            )
        print(f"{name}: {sum(actual.values()):,} sequences, all equal", file=sys.stderr)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in epochs}
    for _ in range(rounds):
        for name, epoch in epochs.items():
            rates[name].append(rate(epoch))
    base = statistics.median(cpu for cpu, _ in rates["ms-data"])
    return {
        name: {
            "sequences_per_cpu_s": round(cpu := statistics.median(pair[0] for pair in samples)),
            "sequences_per_wall_s": round(statistics.median(pair[1] for pair in samples)),
            "ms_data_is_faster_by": round(base / cpu, 2),
        }
        for name, samples in rates.items()
    }


def dense_mask(corpus: Corpus, count: int = 100) -> float:
    """Return sequences per CPU second with Megatron's dense mask per sequence."""
    rows = megatron(
        corpus, reset_position_ids=True, reset_attention_mask=True, create_attention_mask=True
    )()
    start = time.process_time()
    count_done = 0
    while count_done < count:
        count_done += len(next(rows)[0])
    return count_done / (time.process_time() - start)


def main() -> None:
    """Print all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", default="stdlib", help="as for `ms-data build`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run contenders whose names start with these"
    )
    options = parser.parse_args()
    plain = {
        name: contender for name, contender in PLAIN.items() if name.startswith(tuple(options.only))
    }
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder), options.corpus)
        result = {
            "tokens": len(corpus.tokens),
            "tokens and targets": compare(corpus, plain, 2, options.rounds),
            "with positions and documents": compare(corpus, WITH_DOCUMENTS, 4, options.rounds),
        }
        if any(name.startswith("Megatron") for name in plain):
            result["Megatron with dense mask, sequences_per_cpu_s"] = round(dense_mask(corpus))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
