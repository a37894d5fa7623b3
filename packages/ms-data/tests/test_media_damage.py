"""Kills, damage and hostile bytes in images and audio are detected, named and recovered from."""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data import InstructionStream, build, verify
from ms_data.disk.media import PlacedItem, pack_media, read_media
from ms_data.disk.samples import Samples
from ms_data.engine import batches, run
from ms_data.errors import DamageError, TokenizerError
from ms_data.media.audio import decode_audio
from ms_data.media.images import decode_image
from ms_data.media.parts import EncodedFile, extract_media
from ms_data.media.processor import MediaItem, Processor
from ms_data.media.settings import read_settings

from .chat_templates import write_rows
from .media_samples import (
    QWEN2,
    WHISPER,
    encode_audio,
    encode_image,
    media_row,
    random_audio,
    random_image,
    write_model,
)
from .test_clean import run_and_die_at

FILES = [
    encode_image(random_image(30, 20)),
    encode_image(random_image(30, 20), "JPEG"),
    encode_image(random_image(9, 9)[:, :, 0]),
    encode_audio(random_audio(900)),
    encode_audio(random_audio(900), "FLAC"),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with vision and audio, rows with small images and clips, and their shards."""
    folder = tmp_path_factory.mktemp("damage")
    processor_config = {
        "image_processor": {**QWEN2, "max_pixels": 56 * 56},
        "feature_extractor": {**WHISPER, "chunk_length": 1},
    }
    model = write_model(folder / "model", QWEN2)
    (model / "preprocessor_config.json").unlink()
    (model / "processor_config.json").write_text(json.dumps(processor_config))
    corpus = folder / "corpus"
    corpus.mkdir()
    rows = []
    for number in range(9):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"What is {number}?"}]
        if number % 3:
            (corpus / f"{number}.bin").write_bytes(
                encode_image(random_image(20 + number, 20, number))
            )
            parts.append({"type": "image", "image": f"{number}.bin"})
        if number % 4 == 1:
            (corpus / f"{number}.snd").write_bytes(encode_audio(random_audio(1000 + number)))
            parts.append({"type": "audio", "audio": f"{number}.snd"})
        rows.append(media_row(parts, f"It is {number}."))
    write_rows(corpus / "rows.jsonl", rows)
    build_shards(folder, folder / "shards")
    return folder


def build_shards(workspace: Path, out: Path) -> None:
    """Build the shards of the fixture."""
    model = workspace / "model"
    build(
        workspace / "corpus",
        tokenizer=model,
        out=out,
        chat=model,
        processor=model,
        held_out_fraction=0.4,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Map the name of each file in a folder to its content."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("sample_size", [60, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_media_shards_is_detected(
    workspace: Path, tmp_path: Path, sample_size: int
) -> None:
    """`verify` names the file, and a stream raises."""
    copy = Path(shutil.copytree(workspace / "shards", tmp_path / "copy"))
    for path in copy.iterdir():
        if path.name not in ("index.json", "media.json") and path.suffix != ".msd":
            path.unlink()
    shutil.copy(workspace / "shards/tokenizer.json", copy)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(workspace / "shards" / name, copy)
    assert verify(copy).ok
    entries = [entry for entry in Samples(copy).dataset_index.shards if entry.holds_media]
    assert len(entries) == 2
    rng = random.Random(0)
    for name in [*(entry.name for entry in entries), "media.json"]:
        path = copy / name
        content = path.read_bytes()
        offsets = range(len(content))
        edges = [*offsets[:20], *offsets[-100:]]  # header, table, footer and trailer
        for offset in sorted({*edges, *rng.sample(offsets, min(sample_size, len(content)))}):
            flipped = bytearray(content)
            flipped[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            assert name in {fault.file for fault in verify(copy).faults}, (name, offset)
        path.write_bytes(content)
    path = copy / entries[0].name
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    stream = InstructionStream(
        copy, sequence_length=256, batch_size=1, epochs=1, split=entries[0].split[:-6]
    )
    with pytest.raises(DamageError, match=path.name):
        list(stream)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_media_build_killed_at_any_sync_or_rename_resumes_to_identical_bytes(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 2500)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    # Threads of tokenizers do not survive a fork, and the child would wait for them.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    expected = contents(workspace / "shards")
    kills, event = 0, 0
    while True:
        event += step
        out = tmp_path / f"out{event}"
        status = run_and_die_at(event, lambda out=out: build_shards(workspace, out))  # type: ignore[misc]
        assert status in (0, signal.SIGKILL)
        build_shards(workspace, out)
        assert contents(out) == expected
        if not status:
            break
        kills += 1
    assert kills > 20 // step


def assert_reads_or_raises(
    read: Callable[[bytes], object], content: bytes, *errors: type[Exception]
) -> None:
    """Check that reading succeeds, or fails with a one-line error."""
    message = ""
    try:
        read(content)
    except errors as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 700


def read_media_words(content: bytes) -> object:
    """Decode packed media records."""
    return read_media(np.frombuffer(content[: len(content) // 4 * 4] or bytes(4), "<u4"))


PACKED_MEDIA = pack_media(
    [
        PlacedItem(MediaItem("image", FILES[0], 4, (1, 4, 4)), 3),
        PlacedItem(MediaItem("audio", FILES[3], 7, (1, 1, 30)), 20),
    ]
).tobytes()


def corrupt(content: bytes, rng: random.Random) -> bytes:
    """Change some bytes, mostly near the header; truncate or insert a repeat at random."""
    damaged = bytearray(content)
    for _ in range(rng.randrange(1, 8)):
        offset = rng.randrange(min(len(damaged), rng.choice([16, 64, len(damaged)])))
        damaged[offset] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    match rng.randrange(6):
        case 0:
            del damaged[rng.randrange(len(damaged)) :]
        case 1:
            offset = rng.randrange(len(damaged))
            damaged[offset:offset] = damaged[: rng.randrange(64)]
        case _:
            pass
    return bytes(damaged)


def fuzz(seconds: float, rounds: int, seed: int) -> int:
    """Feed corrupt bytes to every reader for at least this many seconds and rounds."""
    rng, completed = random.Random(seed), 0
    readers: list[tuple[Callable[[bytes], object], list[bytes]]] = [
        (decode_image, FILES[:3]),
        (decode_audio, FILES[3:]),
        (read_media_words, [PACKED_MEDIA]),
    ]
    end = time.monotonic() + seconds
    while completed < rounds or time.monotonic() < end:
        for read, files in readers:
            assert_reads_or_raises(read, corrupt(rng.choice(files), rng), ValueError)
        completed += 1
    return completed


def test_readers_survive_corrupt_bytes() -> None:
    """They return or raise a one-line ValueError."""
    assert fuzz(0, 400, seed=1) == 400


@pytest.mark.parametrize("tag", [0x50, 0x55])
def test_mpeg_audio_in_a_wav_file_is_refused_before_decoding(
    tag: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """No library prints anything."""
    content = bytearray(FILES[3])
    offset = content.index(b"fmt ") + 8
    content[offset : offset + 2] = tag.to_bytes(2, "little")
    with pytest.raises(ValueError, match="MPEG audio in a WAV file is not supported"):
        decode_audio(bytes(content))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readers_survive_ten_minutes_of_corrupt_bytes() -> None:
    """Seeded by the date."""
    assert fuzz(600, 400, seed=int(time.time() // 86400)) > 400


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["image", "audio", "image_url", "audio_url"]), VALUES | st.binary())
def test_any_part_is_read_or_refused(part_type: str, value: object) -> None:
    """For arbitrary values in place of a file."""
    messages = [{"role": "user", "content": [{"type": part_type, part_type: value}]}]
    message = "messages[0].content[0]"
    try:
        extract_media(messages, Path("/nonexistent"))
    except ValueError as error:
        message = str(error)
    assert "messages[0].content[0]" in message
    assert "\n" not in message


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted({**QWEN2, **WHISPER, "size": 0, "image_mean": 0})), VALUES)
def test_any_processor_setting_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for config in (QWEN2, WHISPER):
        (folder / "preprocessor_config.json").write_text(json.dumps({**config, name: value}))
        message = "preprocessor_config.json"
        try:
            loaded = read_settings(folder)
            assert loaded.pictures or loaded.sound
        except TokenizerError as error:
            message = str(error)
        assert "preprocessor_config.json" in message
        assert "\n" not in message


def test_an_image_that_no_longer_matches_its_measured_grid_is_refused(tmp_path: Path) -> None:
    processor = Processor.load(write_model(tmp_path, QWEN2))
    item = processor.measure(EncodedFile("image", FILES[0], "here"))
    other = MediaItem("image", encode_image(random_image(300, 20)), item.tokens, item.grid)
    with pytest.raises(ValueError, match="patches do not match the grid"):
        processor.patches([other])
