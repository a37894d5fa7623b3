"""Exchange datasets with the real Megatron-core and mosaicml-streaming, compared token by token.

    nox -s "peers(ms-data)"   or, with the packages installed,   python peers_exchange.py

Exports are read by Megatron's IndexedDataset; files from its builder and from MDSWriter are
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

# streaming imports its vision module, which needs a torchvision build that matches torch.
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

FILES = 200


def read_documents(folder: Path) -> list[list[int]]:
    """Return the tokens of each document, including its end of text."""
    split = Split(folder, "train")
    parts = np.split(split.read(0, split.tokens), split.all_ends())
    return [part.tolist() for part in parts[:-1]]


def megatron(folder: Path, tokenizer: Tokenizer, expected: list[list[int]]) -> None:
    """Export, and import from every token type, with two sequences per document."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    export_dataset(folder / "shards", out=folder / "out", target="megatron")
    dataset = IndexedDataset(str(folder / "out"))
    assert [dataset[index].tolist() for index in range(len(dataset))] == expected
    assert dataset.document_indices.tolist() == list(range(len(expected) + 1))
    for dtype in (np.uint16, np.int32, np.int64):
        prefix = folder / np.dtype(dtype).name
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for tokens in expected:
            cut = len(tokens) // 2
            builder.add_document(torch.tensor(tokens), [cut, len(tokens) - cut])
        builder.finalize(f"{prefix}.idx")
        import_dataset(f"{prefix}.idx", tokenizer=tokenizer, out=f"{prefix}-in")
        assert read_documents(Path(f"{prefix}-in")) == expected
        print(f"Megatron, {np.dtype(dtype).name}: {len(expected)} documents, all equal", flush=True)


def mds(root: Path, tokenizer: Tokenizer, texts: list[str], expected: list[list[int]]) -> None:
    """Import texts and tokens, plain and compressed."""
    from streaming import MDSWriter

    tokens = [np.array(document, np.int64) for document in expected]
    short = [document[-8:].astype(np.uint16) for document in tokens]
    for name, encoding, rows, expected_documents in (
        ("text", "str", texts, expected),
        ("tokens", "bytes", [document.tobytes() for document in tokens], expected),
        ("tokens", "ndarray:uint16:8", short, [document.tolist() for document in short]),
    ):
        for compression in (None, "zstd:3", "gz:5"):
            folder = root / f"mds-{encoding}-{compression}"
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
            assert read_documents(out) == expected_documents
            print(
                f"MDS, {encoding}, {compression}: {len(expected_documents)} documents, all equal",
                flush=True,
            )


def main() -> None:
    """Exchange some files of the standard library."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "corpus").mkdir()
        texts = [document.text for document in find_corpus("stdlib").documents()][:FILES]
        texts = [text for text in texts if len(text) > 100]
        for number, text in enumerate(texts):
            (folder / "corpus" / f"{number:05d}.txt").write_text(text, newline="")
        tokenizer = train_tokenizer(folder / "corpus", vocab_size=2048)
        build(folder / "corpus", tokenizer=tokenizer, out=folder / "shards")
        expected = read_documents(folder / "shards")
        megatron(folder, tokenizer, expected)
        mds(folder, tokenizer, texts, expected)


if __name__ == "__main__":
    main()
