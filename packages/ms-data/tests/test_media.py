"""Pictures and sound in messages: what a stream gives is what transformers' processors give."""

import base64
import io
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ms_data import InstructionStream, Processor, Tokenizer, build, inspect, verify
from ms_data.cli import main
from ms_data.disk.samples import Samples
from ms_data.errors import CorpusError, DamageError, SettingError, TokenizerError
from ms_data.media.parts import EncodedFile
from ms_data.media.pictures import decode_picture, image_patches, patch_grid
from ms_data.media.settings import PICTURE_PIXELS, _picture, _sound, read_settings
from ms_data.media.sound import decode_sound, spectrogram

from .chats import write_rows
from .pictures import (
    QWEN2,
    QWEN3,
    SEEING,
    WHISPER,
    asked,
    drawn,
    encoded,
    hummed,
    png_of,
    recorded,
    write_model,
)

SIZES = [(70, 50), (224, 224), (31, 300), (640, 480), (5, 9), (56, 57)]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, a corpus with pictures as files, bytes in text, and none; and shards."""
    place = tmp_path_factory.mktemp("seeing")
    model = write_model(place / "model", QWEN2)
    corpus = place / "corpus"
    (corpus / "pictures").mkdir(parents=True)
    rows = []
    for n in range(40):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"What is picture {n}? "}]
        for k in range(n % 3):
            width, height = SIZES[(n + k) % len(SIZES)]
            file = encoded(drawn(width, height, n), "JPEG" if n % 2 else "PNG")
            if k:
                address = "data:image/png;base64," + base64.b64encode(file).decode()
                parts.append({"type": "image_url", "image_url": {"url": address}})
            else:
                (corpus / "pictures" / f"{n}.bin").write_bytes(file)
                parts.append({"type": "image", "image": f"pictures/{n}.bin"})
            parts.append({"type": "text", "text": f" and {k} more"})
        rows.append(asked(parts, f"Waves, {n}."))
    write_rows(corpus / "rows.jsonl", rows)
    for k, name in enumerate(("shards", "more")):
        build(
            corpus,
            tokenizer=model,
            out=place / name,
            chat=model,
            processor=model,
            held_out_fraction=k / 9,
        )
    return place


def stream_of(folder: Path, **settings: Any) -> InstructionStream:
    """A stream of the fixture's shards."""
    return InstructionStream(
        {"shards": folder / "shards"},
        **{"sequence_length": 512, "batch_size": 2, "epochs": 1, **settings},
    )


def test_ids_pixels_and_grids_are_those_of_transformers_processor(seeing: Path) -> None:
    """Row by row, for pictures of many sizes, against the classes that models are published for."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = {key: value for key, value in QWEN2.items() if key != "image_processor_type"}
    images = Qwen2VLImageProcessorPil(**config)
    words = PreTrainedTokenizerFast(tokenizer_file=str(seeing / "model/tokenizer.json"))
    words.chat_template = SEEING
    samples = Samples(seeing / "shards")
    processor = samples.processor
    assert processor is not None
    rows = [json.loads(line) for line in (seeing / "corpus/rows.jsonl").read_text().splitlines()]
    assert len(samples) == len(rows)
    seen = 0
    for number, row in enumerate(rows):
        pictures = []
        for part in row["messages"][0]["content"]:
            if part["type"] == "image":
                pictures.append(Image.open(seeing / "corpus" / part["image"]))
            elif part["type"] == "image_url":
                file = base64.b64decode(part["image_url"]["url"].split(",")[1])
                pictures.append(Image.open(io.BytesIO(file)))
        text = words.apply_chat_template(row["messages"], tokenize=False)
        found = samples.media(number)
        assert len(found) == len(pictures)
        seen += len(pictures)
        if pictures:
            expected = images(pictures, return_tensors="np")
            for grid in expected["image_grid_thw"]:
                text = text.replace("<|image_pad|>", "<|place|>" * int(grid.prod() // 4), 1)
            text = text.replace("<|place|>", "<|image_pad|>")
            patches = processor.patches([one.item for one in found])
            assert (patches == expected["pixel_values"]).all()
            grids = [list(one.item.grid) for one in found]
            assert grids == expected["image_grid_thw"].tolist()
        ids = words(text, add_special_tokens=False)["input_ids"]
        sample = samples.conversation(number)
        assert sample.tokens.tolist() == ids
        place = words.convert_tokens_to_ids("<|image_pad|>")
        assert not sample.loss_mask[sample.tokens == place].any()
        for one in found:
            assert set(ids[one.start : one.stop]) == {place}
            assert ids[one.start - 1] != place
            assert ids[one.stop] != place
    assert seen > 30


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1"])
@pytest.mark.parametrize("transparent", [False, True])
def test_what_is_transparent_becomes_what_it_is_to_transformers(
    tmp_path: Path, mode: str, transparent: bool
) -> None:
    """A picture of any mode, with a color that stands for transparent or without."""
    from transformers.image_utils import load_image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = drawn(90, 70)
    pixels[:30, :, :] = 200
    picture = Image.fromarray(pixels).convert(mode)
    color = picture.getpixel((3, 3)) if mode in ("RGB", "L", "P", "1") else None
    settings = {"transparency": color} if transparent and color is not None else {}
    picture.save(tmp_path / "a.png", **settings)
    config = {key: value for key, value in QWEN2.items() if key != "image_processor_type"}
    theirs = Qwen2VLImageProcessorPil(**config)
    expected = theirs([load_image(str(tmp_path / "a.png"))], return_tensors="np")["pixel_values"]
    model = write_model(tmp_path / "model", QWEN2)
    processor = Processor.load(model)
    item = processor.measure(EncodedFile("image", (tmp_path / "a.png").read_bytes(), "here"))
    assert np.array_equal(processor.patches([item]), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 900), st.integers(1, 900), st.sampled_from([QWEN2, QWEN3]))
def test_the_grid_of_any_size_is_the_processors(width: int, height: int, config: Any) -> None:
    """Also at the bounds on pixels, and where both refuse what is too long."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    own = _picture(config, "<|image_pad|>")
    bounds = {"min_pixels": own.min_pixels, "max_pixels": own.max_pixels}
    try:
        down, across = smart_resize(height, width, factor=own.factor, **bounds)
    except ValueError:
        with pytest.raises(ValueError, match="aspect ratios above 200"):
            patch_grid(width, height, own)
        return
    grid = patch_grid(width, height, own)
    assert grid == (1, down // own.patch_size, across // own.patch_size)


@pytest.mark.parametrize("size", [(70, 51), (300, 40), (33, 33)])
def test_patches_of_qwen3_are_the_processors(tmp_path: Path, size: tuple[int, int]) -> None:
    """Files that transformers itself saved give the same, in grey, with a palette, turned too."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = {key: value for key, value in QWEN3.items() if key != "image_processor_type"}
    images = Qwen2VLImageProcessorPil(**config)
    images.save_pretrained(tmp_path)
    own = read_settings(tmp_path).pictures
    assert own is not None
    pixels = drawn(*size)
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    palette = io.BytesIO()
    Image.fromarray(pixels).quantize(16).save(palette, "PNG")
    for file, picture in [
        (encoded(pixels), Image.fromarray(pixels)),
        (encoded(pixels[:, :, 0]), Image.fromarray(pixels[:, :, 0])),
        (palette.getvalue(), Image.open(palette)),
        (encoded(pixels, exif=exif), Image.fromarray(np.rot90(pixels, -1).copy())),
    ]:
        expected = images(picture, return_tensors="np")["pixel_values"]
        assert (image_patches(decode_picture(file), own) == expected).all()


@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_spectrograms_and_ids_are_those_of_qwen2_audio(tmp_path: Path, form: str) -> None:
    """To what 32 bits of torch and 64 of numpy differ by, as transformers' own two paths do."""
    from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor

    template = Qwen2AudioProcessor.default_chat_template.fget(None)
    model = write_model(tmp_path / "model", WHISPER, template)
    sounds = [hummed(n, seed) for seed, n in enumerate((32_000, 1, 700, 16_001, 31_999))]
    sounds[1] = hummed(480)
    rows = []
    for at, samples in enumerate(sounds):
        (tmp_path / f"{at}.snd").write_bytes(recorded(samples, form))
        parts = [{"type": "audio", "audio": f"{at}.snd"}, {"type": "text", "text": "What?"}]
        rows.append(asked(parts, "Humming."))
    write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    build(tmp_path / "rows.jsonl", tokenizer=model, out=out, chat=model, processor=model)
    words = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    hearing = WhisperFeatureExtractor(feature_size=128, chunk_length=2)
    both = Qwen2AudioProcessor(hearing, words, chat_template=template)
    stream = InstructionStream(
        out, sequence_length=128, batch_size=5, open_rows=0, shuffle=False, epochs=1
    )
    batch = next(stream)
    for at, (row, samples) in enumerate(zip(rows, sounds, strict=True)):
        text = both.apply_chat_template(row["messages"], tokenize=False)
        heard = samples.astype(np.float32) / 32768
        expected = both(text=text, audio=[heard], sampling_rate=16_000, return_tensors="np")
        ids = expected["input_ids"][0]
        assert (batch["tokens"][at][: len(ids)] == ids).all()
        assert (batch["feature_attention_mask"][at] == expected["feature_attention_mask"][0]).all()
        difference = np.abs(batch["input_features"][at] - expected["input_features"][0])
        assert difference.max() < 2e-4  # logarithms near the floor of 1e-10; most are at 1e-6
        assert np.median(difference) < 1e-6
        place = words.convert_tokens_to_ids("<|AUDIO|>")
        row_at, start, stop = batch["audio_places"][at]
        assert row_at == at
        assert np.flatnonzero(ids == place).tolist() == list(range(start, stop))
    assert "pixel_values" not in batch


def test_a_packed_batch_says_where_each_picture_stands(seeing: Path) -> None:
    """Features of the pictures of this batch alone, at places that hold their token."""
    number = Tokenizer.load(seeing / "shards").special_token("<|image_pad|>")
    pictures = 0
    for batch in stream_of(seeing):
        marked = np.zeros_like(batch["tokens"], bool)
        patches = 0
        for (row, start, stop), grid in zip(
            batch["image_places"], batch["image_grid_thw"], strict=True
        ):
            marked[row, start:stop] = True
            assert grid.prod() // 4 == stop - start
            assert len(set(batch["documents"][row, start:stop])) == 1
            patches += int(grid.prod())
        assert (marked == (batch["tokens"] == number)).all()
        assert len(batch["pixel_values"]) == patches
        assert (batch["targets"] != number).all()
        pictures += len(batch["image_places"])
    assert pictures == sum(len(Samples(seeing / "shards").media(n)) for n in range(40))


def test_positions_are_those_of_each_document_alone(seeing: Path) -> None:
    """A packed row has, in time, down and across, what its samples have by themselves."""
    alone = {}
    for batch in stream_of(seeing, open_rows=0, batch_size=1):
        size = int((batch["documents"][0] == 0).sum())
        key = tuple(batch["tokens"][0, :size])
        alone[key] = batch["positions_thw"][:, 0, :size]
    seen = 0
    for batch in stream_of(seeing):
        for row in range(2):
            for document in range(int(batch["documents"][row].max())):
                inside = batch["documents"][row] == document
                key = tuple(batch["tokens"][row][inside])
                assert (batch["positions_thw"][:, row][:, inside] == alone[key]).all()
                seen += 1
    assert seen == 40


def test_a_run_resumes_exactly_on_another_number_of_ranks(seeing: Path) -> None:
    """Features, grids and places too."""

    class Rank:
        count = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

    whole = stream_of(seeing, seed=3, epochs=3)
    for _ in range(4):
        next(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    follows = next(whole)
    parts = []
    for rank in range(2):
        one = stream_of(seeing, seed=3, epochs=3, place=Rank(rank))
        one.load_state_dict(state)
        parts.append(next(one))
    assert (np.concatenate([one["tokens"] for one in parts]) == follows["tokens"]).all()
    for name in ("pixel_values", "image_grid_thw"):
        both = np.concatenate([one[name] for one in parts])  # type: ignore[literal-required]
        assert (both == follows[name]).all()  # type: ignore[literal-required]
    second = parts[1]["image_places"] + [1, 0, 0]
    both = np.concatenate([parts[0]["image_places"], second])
    assert (both == follows["image_places"]).all()


def test_text_and_pictures_are_mixed(seeing: Path, tmp_path: Path) -> None:
    """A source without pictures has none, and a batch of it holds empty features."""
    model = seeing / "model"
    write_rows(
        tmp_path / "plain.jsonl", [asked([{"type": "text", "text": f"{n}?"}]) for n in (1, 2)]
    )
    build(tmp_path / "plain.jsonl", tokenizer=model, out=tmp_path / "plain", chat=model)
    stream = InstructionStream(
        {"seen": seeing / "shards", "plain": tmp_path / "plain"},
        sequence_length=256,
        batch_size=2,
        weights={"seen": 0.5, "plain": 0.5},
        open_rows=0,
    )
    batch = stream.of_tasks([1, 1])
    assert batch["pixel_values"].shape == (0, 3 * 2 * 14 * 14)
    assert batch["image_places"].shape == (0, 3)
    assert (batch["positions_thw"] == batch["positions"]).all()


def test_what_does_not_fit_a_row_is_left_out_whole(seeing: Path) -> None:
    """No picture is cut: a row ends before the first one that does not fit."""
    stream = stream_of(seeing, sequence_length=64, open_rows=0, batch_size=1)
    pictures = 0
    for batch in stream:
        for (_, start, stop), grid in zip(
            batch["image_places"], batch["image_grid_thw"], strict=True
        ):
            assert stop - start == grid.prod() // 4
            assert stop <= 64
            pictures += 1
    samples = Samples(seeing / "shards")
    assert stream.counts["shards"]["truncated"] == (samples.sizes > 64).sum() > 0
    held = [one.stop <= 64 for number in range(40) for one in samples.media(number)]
    # A sample of which nothing that is learnt is left gives no row, and so no picture.
    assert 0 < pictures <= sum(held) < len(held)
    with pytest.raises(SettingError, match="cut an image or audio clip into parts"):
        stream_of(seeing, long="split")


def test_shards_hold_the_files_as_they_were_encoded(seeing: Path) -> None:
    """Byte for byte, checked by `verify`, counted apart from tokens by `inspect`."""
    samples = Samples(seeing / "shards")
    for number in range(1, 40, 3):
        first = samples.media(number)[0].item.content
        assert first == (seeing / f"corpus/pictures/{number}.bin").read_bytes()
    assert verify(seeing / "shards").ok
    info = inspect(seeing / "shards")
    assert list(info.splits) == ["train"]
    assert info.splits["train"].documents == 40
    assert info.splits["train"].media_size_bytes > 100_000
    assert list(inspect(seeing / "more").splits) == ["train", "held_out"]
    held = Samples(seeing / "more", "held_out")
    assert sum(len(held.media(n)) for n in range(len(held)))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_tables_and_lines_give_the_same_shards(seeing: Path, tmp_path: Path, form: str) -> None:
    """A column of `datasets`, with the bytes in it, is what a path to the same file is."""
    import pyarrow
    import pyarrow.parquet

    file = (seeing / "corpus/pictures/1.bin").read_bytes()
    (tmp_path / "a.jpg").write_bytes(file)
    inside = {"bytes": file, "path": "elsewhere.jpg"}
    part = {"type": "image", "image": "a.jpg" if form == "jsonl" else inside}
    row = asked([part], "Yes.")
    if form == "jsonl":
        write_rows(tmp_path / "rows.jsonl", [row])
    else:
        row["messages"][1]["content"] = [{"type": "text", "text": "Yes."}]
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        fields = [("type", pyarrow.string()), ("text", pyarrow.string()), ("image", kind)]
        turn = [("role", pyarrow.string()), ("content", pyarrow.list_(pyarrow.struct(fields)))]
        schema = pyarrow.schema([("messages", pyarrow.list_(pyarrow.struct(turn)))])
        table = pyarrow.Table.from_pylist([row], schema=schema)
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    model = seeing / "model"
    out = tmp_path / "out"
    build(tmp_path / f"rows.{form}", tokenizer=model, out=out, chat=model, processor=model)
    item = Samples(out).media(0)[0].item
    assert item.content == file
    assert Samples(out).conversation(0).tokens[item.tokens] > 0


HOSTILE = {
    "..": ({"type": "image", "image": "../secret.png"}, "is outside the media folder"),
    "absolute": ({"type": "image", "image": "/etc/passwd"}, "is outside the media folder"),
    "link": ({"type": "image", "image": "link.png"}, "is a link"),
    "folder link": ({"type": "image", "image": "out/secret.png"}, "is a link"),
    "folder": ({"type": "image", "image": "inner"}, "must be a file"),
    "pipe": ({"type": "image", "image": "pipe"}, "must be a file"),
    "missing": ({"type": "image", "image": "none.png"}, "cannot be read"),
    "NUL": ({"type": "image", "image": "a\0b"}, "is outside the media folder"),
    "endless": ({"type": "image", "image": "x" * 5000}, "cannot be read"),
    "network": ({"type": "image", "image": "https://example.org/a.png"}, "nothing is downloaded"),
    "number": ({"type": "image", "image": 7}, "names no file"),
    "none": ({"type": "image"}, "names no file"),
    "base64": ({"type": "image", "image": "data:image/png;base64,a*b"}, "not valid base64"),
    "plain data": ({"type": "image", "image": "data:image/png,abc"}, "base64"),
    "bomb": ({"type": "image", "image": "bomb.png"}, "more pixels than the limit"),
    "lying": ({"type": "image", "image": "lying.png"}, "broken image"),
    "cut off": ({"type": "image", "image": "cut.jpg"}, "broken image"),
    "gif": ({"type": "image", "image": "a.gif"}, "not a PNG or JPEG image"),
    "text": ({"type": "image", "image": "a.txt"}, "not a PNG or JPEG image"),
    "empty": ({"type": "image", "image": "empty.png"}, "got 0 bytes"),
    "huge": ({"type": "image", "image": "huge.png"}, "must be a file of at most"),
    "thin": ({"type": "image", "image": "thin.png"}, "aspect ratios above 200"),
    "sound": ({"type": "audio", "audio": "a.wav"}, "does not support"),
    "video": ({"type": "video", "video": "a.mp4"}, "is not text, an image or audio"),
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what a corpus could hold to do harm."""
    place = tmp_path_factory.mktemp("hostile")
    corpus = place / "corpus"
    (corpus / "inner").mkdir(parents=True)
    good = encoded(drawn(40, 40))
    (place / "secret.png").write_bytes(good)
    (corpus / "good.png").write_bytes(good)
    (corpus / "link.png").symlink_to(place / "secret.png")
    (corpus / "out").symlink_to(place)
    os.mkfifo(corpus / "pipe")
    (corpus / "bomb.png").write_bytes(png_of(60_000, 60_000))
    (corpus / "lying.png").write_bytes(png_of(400, 400))
    (corpus / "cut.jpg").write_bytes(encoded(drawn(80, 80), "JPEG")[:-400])
    (corpus / "a.gif").write_bytes(encoded(drawn(40, 40), "GIF"))
    (corpus / "a.txt").write_text("no picture")
    (corpus / "empty.png").write_bytes(b"")
    with (corpus / "huge.png").open("wb") as file:
        file.truncate(1 << 26)
    (corpus / "thin.png").write_bytes(encoded(drawn(402, 2)))
    (corpus / "a.wav").write_bytes(recorded(hummed(800)))
    write_model(place / "model", QWEN2)
    return place


@pytest.mark.parametrize("name", HOSTILE)
def test_a_harmful_part_is_refused_in_one_line_and_can_be_left_out(
    hostile: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The place is named, exit code 2; with --skip-invalid the others are built."""
    part, reason = HOSTILE[name]
    rows = [asked([part]), asked([{"type": "image", "image": "good.png"}])]
    write_rows(tmp_path / "rows.jsonl", rows)
    model = str(hostile / "model")
    line = ["build", str(tmp_path / "rows.jsonl"), "--tokenizer", model, "--chat-template", model]
    line += ["--processor", model, "--media-folder", str(hostile / "corpus")]
    assert main([*line, "--out", str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert reason in said
    assert "rows.jsonl:1: messages[0].content[0]" in said
    assert main([*line, "--out", str(tmp_path / "out"), "--skip-invalid"]) == 0
    assert len(Samples(tmp_path / "out")) == 1


WRONG_SOUNDS = {
    "rate": (recorded(hummed(800), rate_hz=8000), "resample it"),
    "long": (recorded(hummed(40_000)), "split it"),
    "short": (recorded(hummed(100)), "too short"),
    "no sound": (b"RIFF", "not a WAV or FLAC file"),
    "cut off": (recorded(hummed(8000))[:-2000], "truncated"),
    "cut flac": (recorded(hummed(8000), "FLAC")[:-4000], "audio|FLAC"),
    "ogg": (recorded(hummed(8000), "OGG"), "is not supported"),
}


@pytest.mark.parametrize("name", WRONG_SOUNDS)
def test_a_wrong_sound_is_refused(tmp_path: Path, name: str) -> None:
    """With the place and what to do."""
    content, reason = WRONG_SOUNDS[name]
    write_model(tmp_path, WHISPER)
    with pytest.raises(ValueError, match=f"here: .*{reason}"):
        Processor.load(tmp_path).measure(EncodedFile("audio", content, "here"))


def test_stereo_is_heard_as_the_mean_of_its_channels() -> None:
    """As audio libraries make one channel of several."""
    both = np.stack([hummed(800), hummed(800, 1)], 1)
    samples, rate_hz = decode_sound(recorded(both))
    assert rate_hz == 16_000
    assert np.allclose(samples, both.astype(np.float32).mean(1) / 32768, atol=1e-7)


def test_a_bomb_is_refused_before_memory_is_taken() -> None:
    """Its head says more pixels than are read: nothing of that size is made."""
    side = int(PICTURE_PIXELS**0.5) + 1
    tracemalloc.start()
    with pytest.raises(ValueError, match="exceed the limit"):
        decode_picture(png_of(side, side))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_without_a_processor_pictures_are_refused(seeing: Path, tmp_path: Path) -> None:
    """By the option that reads them; pairs have none."""
    model = seeing / "model"
    rows = seeing / "corpus/rows.jsonl"
    with pytest.raises(CorpusError, match="--processor"):
        build(rows, tokenizer=model, out=tmp_path / "out", chat=model)
    with pytest.raises(SettingError, match="processor needs conversations"):
        build(rows, tokenizer=model, out=tmp_path / "out", chat=model, pairs=True, processor=model)


def test_a_template_that_prints_other_places_is_refused(seeing: Path, tmp_path: Path) -> None:
    """A picture that the text has no place for would shift all others."""
    (tmp_path / "blind.jinja").write_text(SEEING.replace("<|image_pad|>", "[picture]"))
    model = seeing / "model"
    with pytest.raises(CorpusError, match=r"prints '<\|image_pad\|>' 0 times for 1 parts"):
        build(
            seeing / "corpus",
            tokenizer=model,
            out=tmp_path / "out",
            chat=tmp_path / "blind.jinja",
            processor=model,
        )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "not one of Qwen-VL"),
        ({**QWEN2, "do_resize": False}, "do_resize=false"),
        ({**QWEN2, "resample": 2}, "resample"),
        ({**QWEN2, "patch_size": 10**9}, "patch_size"),
        ({**QWEN2, "max_pixels": 1 << 40}, "max_pixels"),
        ({**QWEN2, "image_std": [0, 1, 1]}, "image_std"),
        ({**QWEN2, "image_mean": "wrong"}, "Expected"),
        ({**WHISPER, "chunk_length": 10**9}, "chunk_length"),
        ({**WHISPER, "feature_extractor_type": "Clap"}, "not Whisper's"),
        ({}, "neither"),
    ],
)
def test_an_unknown_processor_is_refused(tmp_path: Path, config: Any, reason: str) -> None:
    """With the file and what to give instead."""
    write_model(tmp_path, config)
    with pytest.raises(TokenizerError, match=f"preprocessor_config.json: .*{reason}.*use the f"):
        Processor.load(tmp_path)


def test_two_processors_in_one_stream_are_refused(seeing: Path, tmp_path: Path) -> None:
    """One model cannot read both."""
    model = write_model(tmp_path / "model", QWEN3)
    build(seeing / "corpus", tokenizer=model, out=tmp_path / "out", chat=model, processor=model)
    with pytest.raises(SettingError, match="different processors"):
        InstructionStream(
            {"a": seeing / "shards", "b": tmp_path / "out"}, sequence_length=64, batch_size=1
        )


def test_settings_that_were_changed_beside_shards_are_found(seeing: Path, tmp_path: Path) -> None:
    """They decide what the model reads, so they are sealed like the tokenizer."""
    shutil.copytree(seeing / "shards", tmp_path / "copy")
    path = tmp_path / "copy/media.json"
    path.write_bytes(path.read_bytes().replace(b"0.48145466", b"0.48145467"))
    assert [str(one) for one in verify(tmp_path / "copy").faults] == [
        "media.json: file: with chat_template.jinja, with tokenizer_config.json, "
        "checksum differs from the index"
    ]
    with pytest.raises(DamageError, match=r"media.json: file"):
        InstructionStream(tmp_path / "copy", sequence_length=64, batch_size=1)


def test_silence_has_a_spectrogram() -> None:
    """All at the floor, without a number that is none."""
    own = msgspec.structs.replace(_sound(WHISPER, "<|AUDIO|>"), chunk_s=1)
    found = spectrogram(np.zeros(400, np.float32), own)
    assert found.shape == (128, 100)
    assert (found == (-10 + 4) / 4).all()


def test_an_array_of_jobs_makes_the_same_shards(seeing: Path, tmp_path: Path) -> None:
    """Pictures of each part find their places when the parts are merged."""
    model, out = seeing / "model", tmp_path / "out"
    for shard in ("1/2", "2/2", "merge/2"):
        build(seeing / "corpus", tokenizer=model, out=out, chat=model, processor=model, shard=shard)
    for path in (seeing / "shards").glob("shard-*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
