"""Formats of Lance, WebDataset and Hugging Face `datasets`, written and read by these libraries."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import ms_data
from ms_data.corpus.readers.lance import newest_manifests
from ms_data.errors import CorpusError


def test_the_newest_manifest_represents_a_dataset() -> None:
    """Old and new naming of versions, nested folders, and files that are not manifests."""
    newest = 2**64 - 1
    assert newest_manifests(
        [
            *(f"a.lance/_versions/{newest - n:020}.manifest" for n in (1, 3, 2)),
            *(f"b/c.lance/_versions/{n}.manifest" for n in (9, 10, 2)),
            "b/c.lance/_versions/latest_version_hint.json",
            "app.manifest",
            "x_versions/1.manifest",
        ]
    ) == {
        "a.lance/": f"a.lance/_versions/{newest - 3:020}.manifest",
        "b/c.lance/": "b/c.lance/_versions/10.manifest",
    }


@pytest.fixture
def datasets_folder(tmp_path: Path) -> Path:
    """JSON Lines, and shards built from them."""
    lines = [f'{{"text": "Line {n} is {n * n}.", "n": {n}}}' for n in range(3000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    ms_data.train_tokenizer(
        tmp_path / "rows.jsonl", vocab_size=300, out=tmp_path / "tokenizer.json"
    )
    build(tmp_path / "rows.jsonl", tmp_path / "shards")
    return tmp_path


def build(corpus: Path, out: Path, **settings: Any) -> str:
    """Build shards and return their fingerprint."""
    tokenizer = next(
        folder / "tokenizer.json" for folder in out.parents if (folder / "tokenizer.json").exists()
    )
    ms_data.build(corpus, tokenizer=tokenizer, out=out, **settings)
    return ms_data.inspect(out).fingerprint


@pytest.mark.slow
def test_lance_rows_give_the_same_shards(datasets_folder: Path) -> None:
    """Two appended versions with deleted rows, by their folder or a folder above it."""
    lance, arrow = pytest.importorskip("lance"), pytest.importorskip("pyarrow")
    rows = list(ms_data.read_rows(datasets_folder / "rows.jsonl"))
    folder = datasets_folder / "corpus" / "rows.lance"
    lance.write_dataset(arrow.Table.from_pylist(rows[:1700]), str(folder))
    extra = [{"text": "to be deleted", "n": -1}]
    lance.write_dataset(arrow.Table.from_pylist(rows[1700:] + extra), str(folder), mode="append")
    lance.dataset(str(folder)).delete("n = -1")
    expected = ms_data.inspect(datasets_folder / "shards").fingerprint
    assert build(folder, datasets_folder / "from-lance") == expected
    assert build(folder.parent, datasets_folder / "from-folder") == expected
    lance.dataset(str(folder)).delete("n = 7")
    assert build(folder, datasets_folder / "without-7") != expected
    with pytest.raises(CorpusError, match="no column 'body'"):
        build(folder, datasets_folder / "wrong", text_column="body")
    shutil.rmtree(folder / "data")
    with pytest.raises(CorpusError, match="damaged Lance dataset"):
        build(folder, datasets_folder / "damaged")


@pytest.mark.slow
def test_datasets_opens_an_export_which_builds_the_same_shards(datasets_folder: Path) -> None:
    """Text and tokens of every document, and a round trip back to shards."""
    datasets = pytest.importorskip("datasets")
    out = datasets_folder / "hf"
    exported = ms_data.export_dataset(datasets_folder / "shards", out=out, target="datasets")
    rows = datasets.load_from_disk(str(out))
    assert rows.num_rows == exported.documents == 3000
    assert rows["text"][2999] == "Line 2999 is 8994001."
    assert sum(map(len, rows["tokens"])) == exported.tokens
    expected = ms_data.inspect(datasets_folder / "shards").fingerprint
    assert build(out, datasets_folder / "again") == expected


@pytest.mark.slow
def test_shards_of_webdataset_give_the_same_shards(datasets_folder: Path) -> None:
    """Samples with text and other members, in several tar files of `ShardWriter`."""
    webdataset = pytest.importorskip("webdataset")
    corpus = datasets_folder / "wds"
    corpus.mkdir()
    with webdataset.ShardWriter(str(corpus / "part-%05d.tar"), maxcount=700, verbose=0) as writer:
        for number, row in enumerate(ms_data.read_rows(datasets_folder / "rows.jsonl")):
            sample = {"__key__": f"{number:06d}", "txt": row["text"], "cls": row["n"]}
            writer.write(sample)
    assert len(list(corpus.iterdir())) == 5
    expected = ms_data.inspect(datasets_folder / "shards").fingerprint
    assert build(corpus, datasets_folder / "from-wds") == expected
