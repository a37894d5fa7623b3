"""Small datasets with a known content, and the slow truth they are compared with."""

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
    """Writes documents, each with its end, as a dataset of one split."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = token_type_for(vocabulary_size)
    entries = []
    for number, start in enumerate(range(0, len(documents), documents_per_shard)):
        name = f"shard-{number:05d}.msd"
        writer = ShardWriter(folder / name, "train", token_type=kind, frame_tokens=frame_tokens)
        for document in documents[start : start + documents_per_shard]:
            writer.append(document)
        entries.append(writer.close())
    index = Index(
        token_type=kind,
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
    seed: int, count: int, longest: int, vocabulary_size: int = VOCABULARY
) -> list[NDArray[np.int64]]:
    """Documents of 1 to `longest` tokens, the last of each being END."""
    rng = np.random.default_rng(seed)
    return [
        np.append(rng.integers(0, vocabulary_size - 1, rng.integers(0, longest)), END)
        for _ in range(count)
    ]


def true_samples(documents: list[NDArray[np.int64]], length: int) -> list[list[list[int]]]:
    """Every whole sample token by token: tokens, targets, positions and documents."""
    laid = [
        (int(token), place, number, place == len(document) - 1)
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    return [_true_sample(laid, sample, length) for sample in range(len(laid) // length)]


def _true_sample(
    laid: list[tuple[int, int, int, bool]], sample: int, length: int
) -> list[list[int]]:
    rows: list[list[int]] = [[], [], [], []]
    first_place, first = laid[sample * length][1:3]
    for at in range(sample * length, (sample + 1) * length):
        token, place, number, is_last = laid[at]
        rows[0].append(token)
        rows[1].append(-100 if is_last else laid[at + 1][0])
        rows[2].append(place - first_place if number == first else place)
        rows[3].append(number - first)
    return rows
