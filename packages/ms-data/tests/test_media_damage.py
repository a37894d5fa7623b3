"""What kills, damage and hostile bytes do to pictures and sound: found, named, gone on from."""

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
from ms_data.media.parts import EncodedFile, extract_media
from ms_data.media.pictures import decode_picture
from ms_data.media.processor import MediaItem, Processor
from ms_data.media.settings import read_settings
from ms_data.media.sound import decode_sound

from .chats import write_rows
from .pictures import QWEN2, WHISPER, asked, drawn, encoded, hummed, recorded, write_model
from .test_clean import dying_at

FILES = [
    encoded(drawn(30, 20)),
    encoded(drawn(30, 20), "JPEG"),
    encoded(drawn(9, 9)[:, :, 0]),
    recorded(hummed(900)),
    recorded(hummed(900), "FLAC"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees and hears, rows with small pictures and sounds, and their shards."""
    place = tmp_path_factory.mktemp("damage")
    both = {
        "image_processor": {**QWEN2, "max_pixels": 56 * 56},
        "feature_extractor": {**WHISPER, "chunk_length": 1},
    }
    model = write_model(place / "model", QWEN2)
    (model / "preprocessor_config.json").unlink()
    (model / "processor_config.json").write_text(json.dumps(both))
    corpus = place / "corpus"
    corpus.mkdir()
    rows = []
    for number in range(9):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"What is {number}?"}]
        if number % 3:
            (corpus / f"{number}.bin").write_bytes(encoded(drawn(20 + number, 20, number)))
            parts.append({"type": "image", "image": f"{number}.bin"})
        if number % 4 == 1:
            (corpus / f"{number}.snd").write_bytes(recorded(hummed(1000 + number)))
            parts.append({"type": "audio", "audio": f"{number}.snd"})
        rows.append(asked(parts, f"It is {number}."))
    write_rows(corpus / "rows.jsonl", rows)
    made(place, place / "shards")
    return place


def made(place: Path, out: Path) -> None:
    """Builds the shards of the fixture."""
    model = place / "model"
    build(
        place / "corpus",
        tokenizer=model,
        out=out,
        chat=model,
        processor=model,
        held_out_fraction=0.4,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("some", [60, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_any_byte_of_pictures_is_found(
    place: Path, tmp_path: Path, some: int
) -> None:
    """`verify` names the file, and a stream stops instead of learning from it."""
    copy = Path(shutil.copytree(place / "shards", tmp_path / "copy"))
    for path in copy.iterdir():
        if path.name not in ("index.json", "media.json") and path.suffix != ".msd":
            path.unlink()
    shutil.copy(place / "shards/tokenizer.json", copy)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(place / "shards" / name, copy)
    assert verify(copy).ok
    entries = [one for one in Samples(copy).dataset_index.shards if one.holds_media]
    assert len(entries) == 2
    rng = random.Random(0)
    for name in [*(one.name for one in entries), "media.json"]:
        path = copy / name
        content = path.read_bytes()
        places = range(len(content))
        ends = [*places[:20], *places[-100:]]  # head, table, footer and trailer
        for at in sorted({*ends, *rng.sample(places, min(some, len(content)))}):
            flipped = bytearray(content)
            flipped[at] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            assert name in {fault.file for fault in verify(copy).faults}, (name, at)
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
def test_a_kill_at_any_sync_or_rename_loses_no_picture(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The same command again ends in the bytes of a calm build, wherever it was killed."""
    monkeypatch.setattr(batches, "BATCH_CHARACTERS", 2500)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    # Threads of tokenizers do not live on in a child, which would wait for them.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    calm = contents(place / "shards")
    kills, event = 0, 0
    while True:
        event += step
        out = tmp_path / f"out{event}"
        status = dying_at(event, lambda out=out: made(place, out))  # type: ignore[misc]
        assert status in (0, signal.SIGKILL)
        made(place, out)
        assert contents(out) == calm
        if not status:
            break
        kills += 1
    assert kills > 20 // step


def harmless(read: Callable[[bytes], object], content: bytes, *errors: type[Exception]) -> None:
    """Reads bytes, or refuses them in one of these ways and one line."""
    said = ""
    try:
        read(content)
    except errors as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 700


def read_words(content: bytes) -> object:
    """Reads a document of media."""
    return read_media(np.frombuffer(content[: len(content) // 4 * 4] or bytes(4), "<u4"))


PACKED = pack_media(
    [
        PlacedItem(MediaItem("image", FILES[0], 4, (1, 4, 4)), 3),
        PlacedItem(MediaItem("audio", FILES[3], 7, (1, 1, 30)), 20),
    ]
).tobytes()


def spoilt(content: bytes, rng: random.Random) -> bytes:
    """Changes some bytes, mostly near the head; cuts, repeats or lengthens."""
    held = bytearray(content)
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(min(len(held), rng.choice([16, 64, len(held)])))
        held[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    match rng.randrange(6):
        case 0:
            del held[rng.randrange(len(held)) :]
        case 1:
            at = rng.randrange(len(held))
            held[at:at] = held[: rng.randrange(64)]
        case _:
            pass
    return bytes(held)


def fuzz(seconds: float, rounds: int, seed: int) -> int:
    """Gives every reader spoilt bytes, for so long and so often at least."""
    rng, done = random.Random(seed), 0
    readers: list[tuple[Callable[[bytes], object], list[bytes]]] = [
        (decode_picture, FILES[:3]),
        (decode_sound, FILES[3:]),
        (read_words, [PACKED]),
    ]
    end = time.monotonic() + seconds
    while done < rounds or time.monotonic() < end:
        for read, files in readers:
            harmless(read, spoilt(rng.choice(files), rng), ValueError)
        done += 1
    return done


def test_readers_survive_spoilt_bytes() -> None:
    """They read them or refuse them in one line; nothing else comes out of a decoder."""
    assert fuzz(0, 400, seed=1) == 400


@pytest.mark.parametrize("tag", [0x50, 0x55])
def test_mpeg_in_a_wav_file_is_refused_before_its_decoder_sees_it(
    tag: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, and nothing is printed by a library."""
    content = bytearray(FILES[3])
    at = content.index(b"fmt ") + 8
    content[at : at + 2] = tag.to_bytes(2, "little")
    with pytest.raises(ValueError, match="MPEG audio in a WAV file is not supported"):
        decode_sound(bytes(content))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readers_survive_ten_minutes_of_spoilt_bytes() -> None:
    """The same for long, by a seed of the day."""
    assert fuzz(600, 400, seed=int(time.time() // 86400)) > 400


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["image", "audio", "image_url", "audio_url"]), VALUES | st.binary())
def test_any_part_is_read_or_refused(kind: str, value: object) -> None:
    """Whatever a row holds in place of a file."""
    messages = [{"role": "user", "content": [{"type": kind, kind: value}]}]
    said = "messages[0].content[0]"
    try:
        extract_media(messages, Path("/nonexistent"))
    except ValueError as error:
        said = str(error)
    assert "messages[0].content[0]" in said
    assert "\n" not in said


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted({**QWEN2, **WHISPER, "size": 0, "image_mean": 0})), VALUES)
def test_any_setting_of_a_processor_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    """Published files are somebody else's; what cannot be is said in one line with its file."""
    folder = tmp_path_factory.mktemp("any")
    for config in (QWEN2, WHISPER):
        (folder / "preprocessor_config.json").write_text(json.dumps({**config, name: value}))
        said = "preprocessor_config.json"
        try:
            found = read_settings(folder)
            assert found.pictures or found.sound
        except TokenizerError as error:
            said = str(error)
        assert "preprocessor_config.json" in said
        assert "\n" not in said


def test_a_file_that_changed_its_size_since_it_was_measured_is_damage(tmp_path: Path) -> None:
    """No batch is made of features that have other tokens."""
    processor = Processor.load(write_model(tmp_path, QWEN2))
    item = processor.measure(EncodedFile("image", FILES[0], "here"))
    other = MediaItem("image", encoded(drawn(300, 20)), item.tokens, item.grid)
    with pytest.raises(ValueError, match="patches do not match the grid"):
        processor.patches([other])
