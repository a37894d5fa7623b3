"""Rows with bad images or audio are dropped with a reason, and the ledger adds up."""

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
from ms_data.cleaning.near_images import HashIndex
from ms_data.disk.samples import Samples
from ms_data.errors import ConfigError

from .chat_templates import write_rows
from .media_samples import (
    QWEN2,
    encode_audio,
    encode_image,
    media_row,
    random_audio,
    random_image,
    write_model,
)

BLANK = np.full((60, 60, 3), 200, np.uint8)
IMAGES: dict[str, tuple[bytes | None, str, str]] = {
    "good": (encode_image(random_image(60, 50)), "Waves.", ""),
    "another good": (encode_image(random_image(640, 48), "JPEG"), "It has 640 x 48 pixels.", ""),
    "broken": (encode_image(random_image(60, 50))[:-90], "Waves.", "pictures.broken"),
    "missing": (None, "Waves.", "pictures.broken"),
    "blank": (encode_image(BLANK), "Nothing.", "pictures.min_contrast"),
    "tiny": (encode_image(random_image(27, 400)), "A line.", "pictures.min_side"),
    "extreme": (encode_image(random_image(30, 700)), "A line.", "pictures.max_ratio"),
    "another size": (
        encode_image(random_image(60, 50)),
        "It is 640x480 px.",
        "pictures.match_size",
    ),
    "another language": (
        encode_image(random_image(60, 50)),
        "这是一张有波浪的图片。",
        "pictures.match_language",
    ),
}
LOUD = np.clip(random_audio(8000).astype(np.int32) * 9, -32768, 32767).astype(np.int16)
CLIPS = {
    "good": (encode_audio(random_audio(8000)), ""),
    "flac": (encode_audio(random_audio(8000), "FLAC"), ""),
    "silent": (encode_audio((random_audio(8000) // 10_000).astype(np.int16)), "sound.silence_db"),
    "clipped": (encode_audio(LOUD), "sound.max_clipped"),
    "short": (encode_audio(random_audio(800)), "sound.min_s"),
    "long": (encode_audio(random_audio(16_000 * 31)), "sound.max_s"),
    "broken": (encode_audio(random_audio(8000))[:-900], "sound.broken"),
}


def read_json_lines(folder: Path) -> list[Any]:
    """Read the rows of a documents or ledger folder."""
    rows = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            rows += [json.loads(line) for line in reader.read().splitlines()]
    return rows


def test_bad_images_are_dropped_with_their_reason(tmp_path: Path) -> None:
    """The remaining rows build, and the ledger adds up."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    rows = []
    for name, (content, answer, _) in IMAGES.items():
        if content is not None:
            (corpus / f"{name}.bin").write_bytes(content)
        row = media_row([{"type": "image", "image": f"{name}.bin"}], answer)
        rows.append({**row, "language": "en"})
    rows.append({"messages": "no list"})
    write_rows(corpus / "rows.jsonl", rows)
    rules = {"pictures": {"folder": str(corpus), "match_language": True}}
    summary = clean(corpus / "rows.jsonl", rules, out=tmp_path / "out", workers=1)
    assert summary.documents == len(rows)
    assert summary.quarantined == 1
    assert summary.kept + sum(summary.dropped.values()) + summary.quarantined == summary.documents
    reasons = [line.get("reason", "") for line in read_json_lines(tmp_path / "out/ledger")]
    assert reasons == [*(reason for _, _, reason in IMAGES.values()), ""]
    assert read_json_lines(tmp_path / "out/documents") == rows[:2]
    model = write_model(tmp_path / "model", QWEN2)
    from ms_data import Processor

    processor = Processor.load(model, media_folder=corpus)
    build(
        tmp_path / "out", tokenizer=model, out=tmp_path / "shards", chat=model, processor=processor
    )
    assert len(Samples(tmp_path / "shards")) == 2


def test_bad_audio_is_dropped_with_its_reason(tmp_path: Path) -> None:
    """Audio embedded in the rows; the output does not depend on the number of workers."""
    rows = []
    for content, _ in CLIPS.values():
        address = "data:audio/wav;base64," + base64.b64encode(content).decode()
        rows.append(media_row([{"type": "audio", "audio": address}], "Humming."))
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for workers in (1, 2):
        clean(path, {"sound": {}}, out=tmp_path / f"out{workers}", workers=workers)
    reasons = [line.get("reason", "") for line in read_json_lines(tmp_path / "out1/ledger")]
    assert reasons == [reason for _, reason in CLIPS.values()]
    for series in ("ledger", "documents"):
        assert read_json_lines(tmp_path / "out1" / series) == read_json_lines(
            tmp_path / "out2" / series
        )


def test_embedded_image_bytes_survive_cleaning(tmp_path: Path) -> None:
    """They become data URLs of the same file."""
    import pyarrow
    import pyarrow.parquet

    content = encode_image(random_image(60, 50))
    part = {"type": "image", "image": {"bytes": content, "path": "x.png"}}
    turns = media_row([part])["messages"]
    turns[1]["content"] = [{"type": "text", "text": "Waves."}]
    table = pyarrow.Table.from_pylist([{"messages": turns}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    clean(tmp_path / "rows.parquet", {"pictures": {}}, out=tmp_path / "out", workers=1)
    model = write_model(tmp_path / "model", QWEN2)
    build(tmp_path / "out", tokenizer=model, out=tmp_path / "seen", chat=model, processor=model)
    assert Samples(tmp_path / "seen").media(0)[0].item.content == content


def test_near_duplicate_images_are_dropped(tmp_path: Path) -> None:
    """Copies in another size, quality or format; the first kept image stays."""
    waves = Image.fromarray(random_image(200, 160, 1)).filter(ImageFilter.GaussianBlur(4))
    small = waves.resize((130, 104))
    other_images = [
        Image.fromarray(random_image(90, 70, n)).filter(ImageFilter.GaussianBlur(4)) for n in (2, 3)
    ]
    expected = {0, 3, 6}
    files = [
        encode_image(np.asarray(waves)),
        encode_image(np.asarray(waves), "JPEG", quality=60),
        encode_image(np.asarray(small)),
        encode_image(np.asarray(other_images[0])),
        encode_image(np.asarray(other_images[1]))[:-50],  # broken, so its copy stays
        encode_image(np.asarray(small), "JPEG"),
        encode_image(np.asarray(other_images[1])),
    ]
    rows = []
    for content in files:
        address = "data:image/png;base64," + base64.b64encode(content).decode()
        rows.append(media_row([{"type": "image", "image": address}]))
    path = write_rows(tmp_path / "rows.jsonl", rows)
    rules = {"pictures": {"near_bits": 3}}
    for workers in (1, 2):
        summary = clean(path, rules, out=tmp_path / f"out{workers}", workers=workers)
        fates = [
            line["fate"] == "kept" for line in read_json_lines(tmp_path / f"out{workers}/ledger")
        ]
        assert {number for number, is_kept in enumerate(fates) if is_kept} == expected
        assert summary.dropped == {"pictures.near_bits": 3, "pictures.broken": 1}
        assert summary.kept + sum(summary.dropped.values()) == summary.documents == len(rows)


@given(st.integers(0, 2**64 - 1), st.sets(st.integers(0, 63), max_size=6), st.integers(0, 5))
def test_the_hash_index_finds_exactly_the_near_hashes(
    image_hash: int, flipped: set[int], bits: int
) -> None:
    index = HashIndex(bits)
    index.add(image_hash)
    query = image_hash
    for bit in flipped:
        query ^= 1 << bit
    assert index.nearest(query) == (len(flipped) if len(flipped) <= bits else None)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"pictures": {}, "unicode": {}}, "unicode is a rule for text"),
        ({"sound": {"languages": ["en"]}}, "remove its languages"),
        ({"pictures": {"min_side": 0}}, "min_side"),
    ],
)
def test_unusable_media_rules_are_refused(
    tmp_path: Path, rules: dict[str, Any], reason: str
) -> None:
    """Before any row is read."""
    write_rows(tmp_path / "rows.jsonl", [media_row([{"type": "text", "text": "?"}])])
    with pytest.raises(ConfigError, match=reason):
        clean(tmp_path / "rows.jsonl", rules, out=tmp_path / "out")
