"""Rows whose pictures and sounds are bad are dropped by name, and the ledger adds up."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from ms_data import build, clean
from ms_data.cleaning.near_pictures import HashIndex
from ms_data.disk.samples import Samples
from ms_data.errors import ConfigError

from .chats import write_rows
from .pictures import QWEN2, asked, drawn, encoded, hummed, recorded, write_model

BLANK = np.full((60, 60, 3), 200, np.uint8)
PICTURES: dict[str, tuple[bytes | None, str, str]] = {
    "good": (encoded(drawn(60, 50)), "Waves.", ""),
    "another good": (encoded(drawn(640, 48), "JPEG"), "It has 640 x 48 pixels.", ""),
    "broken": (encoded(drawn(60, 50))[:-90], "Waves.", "pictures.broken"),
    "missing": (None, "Waves.", "pictures.broken"),
    "blank": (encoded(BLANK), "Nothing.", "pictures.min_contrast"),
    "tiny": (encoded(drawn(27, 400)), "A line.", "pictures.min_side"),
    "extreme": (encoded(drawn(30, 700)), "A line.", "pictures.max_ratio"),
    "another size": (encoded(drawn(60, 50)), "It is 640x480 px.", "pictures.match_size"),
    "another language": (
        encoded(drawn(60, 50)),
        "这是一张有波浪的图片。",
        "pictures.match_language",
    ),
}
LOUD = np.clip(hummed(8000).astype(np.int32) * 9, -32768, 32767).astype(np.int16)
SOUNDS = {
    "good": (recorded(hummed(8000)), ""),
    "flac": (recorded(hummed(8000), "FLAC"), ""),
    "silent": (recorded((hummed(8000) // 10_000).astype(np.int16)), "sound.silence_db"),
    "clipped": (recorded(LOUD), "sound.max_clipped"),
    "short": (recorded(hummed(800)), "sound.min_s"),
    "long": (recorded(hummed(16_000 * 31)), "sound.max_s"),
    "broken": (recorded(hummed(8000))[:-900], "sound.broken"),
}


def lines_in(folder: Path) -> list[Any]:
    """The rows that were kept, or those of the ledger."""
    found = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            unpacker = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            found += [json.loads(line) for line in unpacker.read().splitlines()]
    return found


def test_bad_pictures_are_dropped_for_their_reason(tmp_path: Path) -> None:
    """What is kept is built, and documents in are kept, dropped and quarantined."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    rows = []
    for name, (content, said, _) in PICTURES.items():
        if content is not None:
            (corpus / f"{name}.bin").write_bytes(content)
        row = asked([{"type": "image", "image": f"{name}.bin"}], said)
        rows.append({**row, "language": "en"})
    rows.append({"messages": "no list"})
    write_rows(corpus / "rows.jsonl", rows)
    rules = {"pictures": {"folder": str(corpus), "match_language": True}}
    summary = clean(corpus / "rows.jsonl", rules, out=tmp_path / "out", workers=1)
    assert summary.documents == len(rows)
    assert summary.quarantined == 1
    assert summary.kept + sum(summary.dropped.values()) + summary.quarantined == summary.documents
    reasons = [line.get("reason", "") for line in lines_in(tmp_path / "out/ledger")]
    assert reasons == [*(reason for _, _, reason in PICTURES.values()), ""]
    assert lines_in(tmp_path / "out/documents") == rows[:2]
    model = write_model(tmp_path / "model", QWEN2)
    from ms_data import Processor

    seen = Processor.load(model, media_folder=corpus)
    build(tmp_path / "out", tokenizer=model, out=tmp_path / "seen", chat=model, processor=seen)
    assert len(Samples(tmp_path / "seen")) == 2


def test_bad_sounds_are_dropped_for_their_reason(tmp_path: Path) -> None:
    """Those in the text of a row; the bytes do not depend on the number of processes."""
    rows = []
    for content, _ in SOUNDS.values():
        address = "data:audio/wav;base64," + base64.b64encode(content).decode()
        rows.append(asked([{"type": "audio", "audio": address}], "Humming."))
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for workers in (1, 2):
        clean(path, {"sound": {}}, out=tmp_path / f"out{workers}", workers=workers)
    reasons = [line.get("reason", "") for line in lines_in(tmp_path / "out1/ledger")]
    assert reasons == [reason for _, reason in SOUNDS.values()]
    for series in ("ledger", "documents"):
        assert lines_in(tmp_path / "out1" / series) == lines_in(tmp_path / "out2" / series)


def test_a_table_with_bytes_is_cleaned_to_rows_that_are_read(tmp_path: Path) -> None:
    """Bytes become addresses, which hold the same file."""
    import pyarrow
    import pyarrow.parquet

    file = encoded(drawn(60, 50))
    part = {"type": "image", "image": {"bytes": file, "path": "x.png"}}
    turns = asked([part])["messages"]
    turns[1]["content"] = [{"type": "text", "text": "Waves."}]
    table = pyarrow.Table.from_pylist([{"messages": turns}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    clean(tmp_path / "rows.parquet", {"pictures": {}}, out=tmp_path / "out", workers=1)
    model = write_model(tmp_path / "model", QWEN2)
    build(tmp_path / "out", tokenizer=model, out=tmp_path / "seen", chat=model, processor=model)
    assert Samples(tmp_path / "seen").media(0)[0].item.content == file


def test_near_duplicates_of_pictures_are_dropped(tmp_path: Path) -> None:
    """Copies of another size, quality and form; the first that is kept stays, however many work."""
    waves = Image.fromarray(drawn(200, 160, 1)).filter(ImageFilter.GaussianBlur(4))
    small = waves.resize((130, 104))
    others = [Image.fromarray(drawn(90, 70, n)).filter(ImageFilter.GaussianBlur(4)) for n in (2, 3)]
    kept = {0, 3, 6}
    files = [
        encoded(np.asarray(waves)),
        encoded(np.asarray(waves), "JPEG", quality=60),
        encoded(np.asarray(small)),
        encoded(np.asarray(others[0])),
        encoded(np.asarray(others[1]))[:-50],  # broken, so that its copy stays
        encoded(np.asarray(small), "JPEG"),
        encoded(np.asarray(others[1])),
    ]
    rows = []
    for file in files:
        address = "data:image/png;base64," + base64.b64encode(file).decode()
        rows.append(asked([{"type": "image", "image": address}]))
    path = write_rows(tmp_path / "rows.jsonl", rows)
    rules = {"pictures": {"near_bits": 3}}
    for workers in (1, 2):
        summary = clean(path, rules, out=tmp_path / f"out{workers}", workers=workers)
        fates = [line["fate"] == "kept" for line in lines_in(tmp_path / f"out{workers}/ledger")]
        assert {number for number, stays in enumerate(fates) if stays} == kept
        assert summary.dropped == {"pictures.near_bits": 3, "pictures.broken": 1}
        assert summary.kept + sum(summary.dropped.values()) == summary.documents == len(rows)


@given(st.integers(0, 2**64 - 1), st.sets(st.integers(0, 63), max_size=6), st.integers(0, 5))
def test_every_hash_that_is_near_is_found(found: int, flipped: set[int], bits: int) -> None:
    """And none that is not, whichever bits differ."""
    seen = HashIndex(bits)
    seen.add(found)
    other = found
    for bit in flipped:
        other ^= 1 << bit
    assert seen.nearest(other) == (len(flipped) if len(flipped) <= bits else None)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"pictures": {}, "unicode": {}}, "unicode is a rule for text"),
        ({"sound": {"languages": ["en"]}}, "remove its languages"),
        ({"pictures": {"min_side": 0}}, "min_side"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(
    tmp_path: Path, rules: dict[str, Any], reason: str
) -> None:
    """Before any row is read."""
    write_rows(tmp_path / "rows.jsonl", [asked([{"type": "text", "text": "?"}])])
    with pytest.raises(ConfigError, match=reason):
        clean(tmp_path / "rows.jsonl", rules, out=tmp_path / "out")
