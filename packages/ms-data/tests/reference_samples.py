"""Small datasets with known content, and a slow reference implementation to compare with."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ms_data.disk.format import Index, encode_index, token_type_for
from ms_data.disk.writer import ShardWriter

VOCABULARY = 500
END = 499


def write_dataset(
    folder: Path,
    documents: list[NDArray[np.int64]],
    *,
    frame_tokens: int = 16,
    documents_per_shard: int = 7,
    vocabulary_size: int = VOCABULARY,
) -> Path:
    """Write documents, each ending in END, as a dataset with one split."""
    folder.mkdir(parents=True, exist_ok=True)
    token_type = token_type_for(vocabulary_size)
    entries = []
    for number, start in enumerate(range(0, len(documents), documents_per_shard)):
        name = f"shard-{number:05d}.msd"
        writer = ShardWriter(
            folder / name, "train", token_type=token_type, frame_tokens=frame_tokens
        )
        for document in documents[start : start + documents_per_shard]:
            writer.append(document)
        entries.append(writer.close())
    index = Index(
        token_type=token_type,
        frame_tokens=frame_tokens,
        vocabulary_size=vocabulary_size,
        end_of_text=END,
        tokenizer="99aa06d3014798d86001c324468d497f",  # of an empty file
        held_out_fraction=0.0,
        shards=tuple(entries),
    )
    (folder / "index.json").write_bytes(encode_index(index))
    (folder / "tokenizer.json").write_bytes(b"")
    return folder


def random_documents(
    seed: int, count: int, max_tokens: int, vocabulary_size: int = VOCABULARY
) -> list[NDArray[np.int64]]:
    """Return random documents of 1 to `max_tokens` tokens, each ending in END."""
    rng = np.random.default_rng(seed)
    return [
        np.append(rng.integers(0, vocabulary_size - 1, rng.integers(0, max_tokens)), END)
        for _ in range(count)
    ]


def true_samples(documents: list[NDArray[np.int64]], length: int) -> list[list[list[int]]]:
    """Return tokens, targets, positions and document numbers of every full sample."""
    stream = [
        (int(token), position, number, position == len(document) - 1)
        for number, document in enumerate(documents)
        for position, token in enumerate(document)
    ]
    return [_true_sample(stream, sample, length) for sample in range(len(stream) // length)]


def _true_sample(
    stream: list[tuple[int, int, int, bool]], sample: int, length: int
) -> list[list[int]]:
    rows: list[list[int]] = [[], [], [], []]
    first_position, first = stream[sample * length][1:3]
    for index in range(sample * length, (sample + 1) * length):
        token, position, number, is_last = stream[index]
        rows[0].append(token)
        rows[1].append(-100 if is_last else stream[index + 1][0])
        rows[2].append(position - first_position if number == first else position)
        rows[3].append(number - first)
    return rows
