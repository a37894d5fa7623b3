"""Exchanges datasets with Megatron-core and mosaicml-streaming themselves, token by token.

    nox -s "peers(ms-data)"   or, with the packages installed,   python peers_exchange.py

What is exported is read by Megatron's IndexedDataset; what its builder and MDSWriter wrote is
imported. Stops at the first document that differs.
"""

import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch

from ms_data import Tokenizer, build, export_dataset, import_dataset, train_tokenizer
from ms_data.corpus.find import find_corpus
from ms_data.disk.split import Split

# streaming imports its vision part, which needs a torchvision that matches torch to the build.
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

FILES = 200


def documents_of(folder: Path) -> list[list[int]]:
    """The tokens of each document, with its end of text."""
    split = Split(folder, "train")
    parts = np.split(split.read(0, split.tokens), split.all_ends())
    return [part.tolist() for part in parts[:-1]]


def megatron(place: Path, tokenizer: Tokenizer, expected: list[list[int]]) -> None:
    """Out, and in from each type of token, with documents of two sequences."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    export_dataset(place / "shards", out=place / "out", target="megatron")
    dataset = IndexedDataset(str(place / "out"))
    assert [dataset[at].tolist() for at in range(len(dataset))] == expected
    assert dataset.document_indices.tolist() == list(range(len(expected) + 1))
    for kind in (np.uint16, np.int32, np.int64):
        prefix = place / np.dtype(kind).name
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=kind)
        for tokens in expected:
            cut = len(tokens) // 2
            builder.add_document(torch.tensor(tokens), [cut, len(tokens) - cut])
        builder.finalize(f"{prefix}.idx")
        import_dataset(f"{prefix}.idx", tokenizer=tokenizer, out=f"{prefix}-in")
        assert documents_of(Path(f"{prefix}-in")) == expected
        print(f"Megatron, {np.dtype(kind).name}: {len(expected)} documents, all equal", flush=True)


def mds(place: Path, tokenizer: Tokenizer, texts: list[str], expected: list[list[int]]) -> None:
    """Texts and tokens in, plain and packed."""
    from streaming import MDSWriter

    tokens = [np.array(one, np.int64) for one in expected]
    short = [one[-8:].astype(np.uint16) for one in tokens]
    for name, encoding, rows, wanted in (
        ("text", "str", texts, expected),
        ("tokens", "bytes", [one.tobytes() for one in tokens], expected),
        ("tokens", "ndarray:uint16:8", short, [one.tolist() for one in short]),
    ):
        for compression in (None, "zstd:3", "gz:5"):
            folder = place / f"mds-{encoding}-{compression}"
            columns = {name: encoding, "other": "json"}
            with MDSWriter(
                out=str(folder),
                columns=columns,
                compression=compression,
                hashes=["sha1", "xxh64"],
                size_limit=1 << 20,
            ) as writer:
                for number, row in enumerate(rows):
                    writer.write({name: row, "other": {"n": number}})
            out = folder.with_name(f"{folder.name}-in")
            import_dataset(folder, tokenizer=tokenizer, out=out, column=name)
            assert documents_of(out) == wanted
            print(f"MDS, {encoding}, {compression}: {len(wanted)} documents, all equal", flush=True)


def main() -> None:
    """Exchanges some files of the standard library."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "corpus").mkdir()
        texts = [one.text for one in find_corpus("stdlib").documents()][:FILES]
        texts = [text for text in texts if len(text) > 100]
        for number, text in enumerate(texts):
            (place / "corpus" / f"{number:05d}.txt").write_text(text, newline="")
        tokenizer = train_tokenizer(place / "corpus", vocab_size=2048)
        build(place / "corpus", tokenizer=tokenizer, out=place / "shards")
        expected = documents_of(place / "shards")
        megatron(place, tokenizer, expected)
        mds(place, tokenizer, texts, expected)


if __name__ == "__main__":
    main()
