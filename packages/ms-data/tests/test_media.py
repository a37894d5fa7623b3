"""Images and audio in conversations: stream output matches the transformers processors."""

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
from ms_data.media.audio import decode_audio, spectrogram
from ms_data.media.images import decode_image, image_patches, patch_grid
from ms_data.media.parts import EncodedFile
from ms_data.media.settings import IMAGE_PIXELS, _audio_settings, _image_settings, read_settings

from .chat_templates import write_rows
from .media_samples import (
    QWEN2,
    QWEN3,
    VISION_TEMPLATE,
    WHISPER,
    encode_audio,
    encode_image,
    media_row,
    png_claiming,
    random_audio,
    random_image,
    write_model,
)

SIZES = [(70, 50), (224, 224), (31, 300), (640, 480), (5, 9), (56, 57)]


@pytest.fixture(scope="module")
def vision_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, a corpus with images in files and inline base64, and two datasets."""
    folder = tmp_path_factory.mktemp("seeing")
    model = write_model(folder / "model", QWEN2)
    corpus = folder / "corpus"
    (corpus / "pictures").mkdir(parents=True)
    rows = []
    for n in range(40):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"What is picture {n}? "}]
        for index in range(n % 3):
            width, height = SIZES[(n + index) % len(SIZES)]
            image = encode_image(random_image(width, height, n), "JPEG" if n % 2 else "PNG")
            if index:
                address = "data:image/png;base64," + base64.b64encode(image).decode()
                parts.append({"type": "image_url", "image_url": {"url": address}})
            else:
                (corpus / "pictures" / f"{n}.bin").write_bytes(image)
                parts.append({"type": "image", "image": f"pictures/{n}.bin"})
            parts.append({"type": "text", "text": f" and {index} more"})
        rows.append(media_row(parts, f"Waves, {n}."))
    write_rows(corpus / "rows.jsonl", rows)
    for index, name in enumerate(("shards", "more")):
        build(
            corpus,
            tokenizer=model,
            out=folder / name,
            chat=model,
            processor=model,
            held_out_fraction=index / 9,
        )
    return folder


def open_stream(folder: Path, **settings: Any) -> InstructionStream:
    """Open a stream of the fixture's shards."""
    return InstructionStream(
        {"shards": folder / "shards"},
        **{"sequence_length": 512, "batch_size": 2, "epochs": 1, **settings},
    )


def test_token_ids_pixels_and_grids_match_transformers(vision_data: Path) -> None:
    """Compare row by row, for images of many sizes, with the transformers classes."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = {key: value for key, value in QWEN2.items() if key != "image_processor_type"}
    images = Qwen2VLImageProcessorPil(**config)
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(vision_data / "model/tokenizer.json"))
    hf_tokenizer.chat_template = VISION_TEMPLATE
    samples = Samples(vision_data / "shards")
    processor = samples.processor
    assert processor is not None
    rows = [
        json.loads(line) for line in (vision_data / "corpus/rows.jsonl").read_text().splitlines()
    ]
    assert len(samples) == len(rows)
    compared = 0
    for number, row in enumerate(rows):
        pictures = []
        for part in row["messages"][0]["content"]:
            if part["type"] == "image":
                pictures.append(Image.open(vision_data / "corpus" / part["image"]))
            elif part["type"] == "image_url":
                file = base64.b64decode(part["image_url"]["url"].split(",")[1])
                pictures.append(Image.open(io.BytesIO(file)))
        text = hf_tokenizer.apply_chat_template(row["messages"], tokenize=False)
        media = samples.media(number)
        assert len(media) == len(pictures)
        compared += len(pictures)
        if pictures:
            expected = images(pictures, return_tensors="np")
            for grid in expected["image_grid_thw"]:
                text = text.replace("<|image_pad|>", "<|pad|>" * int(grid.prod() // 4), 1)
            text = text.replace("<|pad|>", "<|image_pad|>")
            patches = processor.patches([span.item for span in media])
            assert (patches == expected["pixel_values"]).all()
            grids = [list(span.item.grid) for span in media]
            assert grids == expected["image_grid_thw"].tolist()
        ids = hf_tokenizer(text, add_special_tokens=False)["input_ids"]
        sample = samples.conversation(number)
        assert sample.tokens.tolist() == ids
        pad_id = hf_tokenizer.convert_tokens_to_ids("<|image_pad|>")
        assert not sample.loss_mask[sample.tokens == pad_id].any()
        for span in media:
            assert set(ids[span.start : span.stop]) == {pad_id}
            assert ids[span.start - 1] != pad_id
            assert ids[span.stop] != pad_id
    assert compared > 30


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1"])
@pytest.mark.parametrize("transparent", [False, True])
def test_transparency_is_handled_like_transformers(
    tmp_path: Path, mode: str, transparent: bool
) -> None:
    """Images of every mode, with and without a transparent color."""
    from transformers.image_utils import load_image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = random_image(90, 70)
    pixels[:30, :, :] = 200
    picture = Image.fromarray(pixels).convert(mode)
    color = picture.getpixel((3, 3)) if mode in ("RGB", "L", "P", "1") else None
    settings = {"transparency": color} if transparent and color is not None else {}
    picture.save(tmp_path / "a.png", **settings)
    config = {key: value for key, value in QWEN2.items() if key != "image_processor_type"}
    hf_processor = Qwen2VLImageProcessorPil(**config)
    expected = hf_processor([load_image(str(tmp_path / "a.png"))], return_tensors="np")[
        "pixel_values"
    ]
    model = write_model(tmp_path / "model", QWEN2)
    processor = Processor.load(model)
    item = processor.measure(EncodedFile("image", (tmp_path / "a.png").read_bytes(), "here"))
    assert np.array_equal(processor.patches([item]), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 900), st.integers(1, 900), st.sampled_from([QWEN2, QWEN3]))
def test_patch_grids_of_random_sizes_match_transformers(
    width: int, height: int, config: Any
) -> None:
    """Includes sizes at the pixel limits and extreme aspect ratios that both refuse."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    vision = _image_settings(config, "<|image_pad|>")
    bounds = {"min_pixels": vision.min_pixels, "max_pixels": vision.max_pixels}
    try:
        height_px, across = smart_resize(height, width, factor=vision.factor, **bounds)
    except ValueError:
        with pytest.raises(ValueError, match="aspect ratios above 200"):
            patch_grid(width, height, vision)
        return
    grid = patch_grid(width, height, vision)
    assert grid == (1, height_px // vision.patch_size, across // vision.patch_size)


@pytest.mark.parametrize("size", [(70, 51), (300, 40), (33, 33)])
def test_qwen3_patches_match_transformers(tmp_path: Path, size: tuple[int, int]) -> None:
    """Settings saved by transformers; grayscale, palette and EXIF-rotated images."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = {key: value for key, value in QWEN3.items() if key != "image_processor_type"}
    images = Qwen2VLImageProcessorPil(**config)
    images.save_pretrained(tmp_path)
    settings = read_settings(tmp_path).pictures
    assert settings is not None
    pixels = random_image(*size)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    palette = io.BytesIO()
    Image.fromarray(pixels).quantize(16).save(palette, "PNG")
    for content, picture in [
        (encode_image(pixels), Image.fromarray(pixels)),
        (encode_image(pixels[:, :, 0]), Image.fromarray(pixels[:, :, 0])),
        (palette.getvalue(), Image.open(palette)),
        (encode_image(pixels, exif=exif), Image.fromarray(np.rot90(pixels, -1).copy())),
    ]:
        expected = images(picture, return_tensors="np")["pixel_values"]
        assert (image_patches(decode_image(content), settings) == expected).all()


@pytest.mark.parametrize("file_format", ["WAV", "FLAC"])
def test_spectrograms_and_token_ids_match_qwen2_audio(tmp_path: Path, file_format: str) -> None:
    """The tolerances allow for float32 torch versus float64 numpy, as within transformers."""
    from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor

    template = Qwen2AudioProcessor.default_chat_template.fget(None)
    model = write_model(tmp_path / "model", WHISPER, template)
    sounds = [random_audio(n, seed) for seed, n in enumerate((32_000, 1, 700, 16_001, 31_999))]
    sounds[1] = random_audio(480)
    rows = []
    for index, samples in enumerate(sounds):
        (tmp_path / f"{index}.snd").write_bytes(encode_audio(samples, file_format))
        parts = [{"type": "audio", "audio": f"{index}.snd"}, {"type": "text", "text": "What?"}]
        rows.append(media_row(parts, "Humming."))
    write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    build(tmp_path / "rows.jsonl", tokenizer=model, out=out, chat=model, processor=model)
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    feature_extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=2)
    hf_processor = Qwen2AudioProcessor(feature_extractor, hf_tokenizer, chat_template=template)
    stream = InstructionStream(
        out, sequence_length=128, batch_size=5, open_rows=0, shuffle=False, epochs=1
    )
    batch = next(stream)
    for index, (row, samples) in enumerate(zip(rows, sounds, strict=True)):
        text = hf_processor.apply_chat_template(row["messages"], tokenize=False)
        waveform = samples.astype(np.float32) / 32768
        expected = hf_processor(
            text=text, audio=[waveform], sampling_rate=16_000, return_tensors="np"
        )
        ids = expected["input_ids"][0]
        assert (batch["tokens"][index][: len(ids)] == ids).all()
        assert (
            batch["feature_attention_mask"][index] == expected["feature_attention_mask"][0]
        ).all()
        difference = np.abs(batch["input_features"][index] - expected["input_features"][0])
        assert (
            difference.max() < 2e-4
        )  # logarithms near the floor of 1e-10; most differ by about 1e-6
        assert np.median(difference) < 1e-6
        audio_id = hf_tokenizer.convert_tokens_to_ids("<|AUDIO|>")
        row_index, start, stop = batch["audio_places"][index]
        assert row_index == index
        assert np.flatnonzero(ids == audio_id).tolist() == list(range(start, stop))
    assert "pixel_values" not in batch


def test_packed_batches_locate_every_image(vision_data: Path) -> None:
    """Each batch holds only its images' features; their positions hold the pad token."""
    pad_id = Tokenizer.load(vision_data / "shards").special_token("<|image_pad|>")
    pictures = 0
    for batch in open_stream(vision_data):
        is_image = np.zeros_like(batch["tokens"], bool)
        patches = 0
        for (row, start, stop), grid in zip(
            batch["image_places"], batch["image_grid_thw"], strict=True
        ):
            is_image[row, start:stop] = True
            assert grid.prod() // 4 == stop - start
            assert len(set(batch["documents"][row, start:stop])) == 1
            patches += int(grid.prod())
        assert (is_image == (batch["tokens"] == pad_id)).all()
        assert len(batch["pixel_values"]) == patches
        assert (batch["targets"] != pad_id).all()
        pictures += len(batch["image_places"])
    assert pictures == sum(len(Samples(vision_data / "shards").media(n)) for n in range(40))


def test_packed_positions_equal_those_of_unpacked_samples(vision_data: Path) -> None:
    """Time, height and width positions of a packed row restart with each document."""
    unpacked = {}
    for batch in open_stream(vision_data, open_rows=0, batch_size=1):
        size = int((batch["documents"][0] == 0).sum())
        key = tuple(batch["tokens"][0, :size])
        unpacked[key] = batch["positions_thw"][:, 0, :size]
    compared = 0
    for batch in open_stream(vision_data):
        for row in range(2):
            for document in range(int(batch["documents"][row].max())):
                inside = batch["documents"][row] == document
                key = tuple(batch["tokens"][row][inside])
                assert (batch["positions_thw"][:, row][:, inside] == unpacked[key]).all()
                compared += 1
    assert compared == 40


def test_a_run_resumes_exactly_with_a_different_number_of_ranks(vision_data: Path) -> None:
    """Includes image features, grids and positions."""

    class Rank:
        count = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

    reference = open_stream(vision_data, seed=3, epochs=3)
    for _ in range(4):
        next(reference)
    state = json.loads(json.dumps(reference.state_dict()))
    expected = next(reference)
    parts = []
    for rank in range(2):
        stream = open_stream(vision_data, seed=3, epochs=3, place=Rank(rank))
        stream.load_state_dict(state)
        parts.append(next(stream))
    assert (np.concatenate([stream["tokens"] for stream in parts]) == expected["tokens"]).all()
    for name in ("pixel_values", "image_grid_thw"):
        both = np.concatenate([stream[name] for stream in parts])  # type: ignore[literal-required]
        assert (both == expected[name]).all()  # type: ignore[literal-required]
    second = parts[1]["image_places"] + [1, 0, 0]
    both = np.concatenate([parts[0]["image_places"], second])
    assert (both == expected["image_places"]).all()


def test_text_only_and_image_sources_can_be_mixed(vision_data: Path, tmp_path: Path) -> None:
    """A batch from the text-only source has empty image features."""
    model = vision_data / "model"
    write_rows(
        tmp_path / "plain.jsonl", [media_row([{"type": "text", "text": f"{n}?"}]) for n in (1, 2)]
    )
    build(tmp_path / "plain.jsonl", tokenizer=model, out=tmp_path / "plain", chat=model)
    stream = InstructionStream(
        {"seen": vision_data / "shards", "plain": tmp_path / "plain"},
        sequence_length=256,
        batch_size=2,
        weights={"seen": 0.5, "plain": 0.5},
        open_rows=0,
    )
    batch = stream.of_tasks([1, 1])
    assert batch["pixel_values"].shape == (0, 3 * 2 * 14 * 14)
    assert batch["image_places"].shape == (0, 3)
    assert (batch["positions_thw"] == batch["positions"]).all()


def test_images_that_do_not_fit_a_row_are_dropped_entirely(vision_data: Path) -> None:
    """A row is truncated before the first image that does not fit."""
    stream = open_stream(vision_data, sequence_length=64, open_rows=0, batch_size=1)
    pictures = 0
    for batch in stream:
        for (_, start, stop), grid in zip(
            batch["image_places"], batch["image_grid_thw"], strict=True
        ):
            assert stop - start == grid.prod() // 4
            assert stop <= 64
            pictures += 1
    samples = Samples(vision_data / "shards")
    assert stream.counts["shards"]["truncated"] == (samples.sizes > 64).sum() > 0
    fits = [span.stop <= 64 for number in range(40) for span in samples.media(number)]
    # A sample truncated before its first target gives no row and therefore no image.
    assert 0 < pictures <= sum(fits) < len(fits)
    with pytest.raises(SettingError, match="cut an image or audio clip into parts"):
        open_stream(vision_data, long="split")


def test_shards_store_media_files_byte_for_byte(vision_data: Path) -> None:
    """`verify` checks them, and `inspect` counts them separately from tokens."""
    samples = Samples(vision_data / "shards")
    for number in range(1, 40, 3):
        first = samples.media(number)[0].item.content
        assert first == (vision_data / f"corpus/pictures/{number}.bin").read_bytes()
    assert verify(vision_data / "shards").ok
    info = inspect(vision_data / "shards")
    assert list(info.splits) == ["train"]
    assert info.splits["train"].documents == 40
    assert info.splits["train"].media_size_bytes > 100_000
    assert list(inspect(vision_data / "more").splits) == ["train", "held_out"]
    held_out = Samples(vision_data / "more", "held_out")
    assert sum(len(held_out.media(n)) for n in range(len(held_out)))


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_parquet_bytes_and_jsonl_paths_store_the_same_file(
    vision_data: Path, tmp_path: Path, file_format: str
) -> None:
    """A `datasets` image column with embedded bytes is equivalent to a path to the same file."""
    import pyarrow
    import pyarrow.parquet

    content = (vision_data / "corpus/pictures/1.bin").read_bytes()
    (tmp_path / "a.jpg").write_bytes(content)
    embedded = {"bytes": content, "path": "elsewhere.jpg"}
    part = {"type": "image", "image": "a.jpg" if file_format == "jsonl" else embedded}
    row = media_row([part], "Yes.")
    if file_format == "jsonl":
        write_rows(tmp_path / "rows.jsonl", [row])
    else:
        row["messages"][1]["content"] = [{"type": "text", "text": "Yes."}]
        image_type = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        fields = [("type", pyarrow.string()), ("text", pyarrow.string()), ("image", image_type)]
        turn = [("role", pyarrow.string()), ("content", pyarrow.list_(pyarrow.struct(fields)))]
        schema = pyarrow.schema([("messages", pyarrow.list_(pyarrow.struct(turn)))])
        table = pyarrow.Table.from_pylist([row], schema=schema)
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    model = vision_data / "model"
    out = tmp_path / "out"
    build(tmp_path / f"rows.{file_format}", tokenizer=model, out=out, chat=model, processor=model)
    item = Samples(out).media(0)[0].item
    assert item.content == content
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
    "video": ({"type": "video", "video": "a.txt"}, "not an MP4 or WebM file"),
    "other": ({"type": "file", "file": "a.txt"}, "is not text, an image, audio or a video"),
}


@pytest.fixture(scope="module")
def hostile_media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus folder with files that could do harm."""
    folder = tmp_path_factory.mktemp("hostile")
    corpus = folder / "corpus"
    (corpus / "inner").mkdir(parents=True)
    good = encode_image(random_image(40, 40))
    (folder / "secret.png").write_bytes(good)
    (corpus / "good.png").write_bytes(good)
    (corpus / "link.png").symlink_to(folder / "secret.png")
    (corpus / "out").symlink_to(folder)
    os.mkfifo(corpus / "pipe")
    (corpus / "bomb.png").write_bytes(png_claiming(60_000, 60_000))
    (corpus / "lying.png").write_bytes(png_claiming(400, 400))
    (corpus / "cut.jpg").write_bytes(encode_image(random_image(80, 80), "JPEG")[:-400])
    (corpus / "a.gif").write_bytes(encode_image(random_image(40, 40), "GIF"))
    (corpus / "a.txt").write_text("no picture")
    (corpus / "empty.png").write_bytes(b"")
    with (corpus / "huge.png").open("wb") as file:
        file.truncate(1 << 26)
    (corpus / "thin.png").write_bytes(encode_image(random_image(402, 2)))
    (corpus / "a.wav").write_bytes(encode_audio(random_audio(800)))
    write_model(folder / "model", QWEN2)
    return folder


@pytest.mark.parametrize("name", HOSTILE)
def test_harmful_media_are_refused_in_one_line_or_skipped(
    hostile_media: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error names the location and exits 2; --skip-invalid builds the remaining rows."""
    part, reason = HOSTILE[name]
    rows = [media_row([part]), media_row([{"type": "image", "image": "good.png"}])]
    write_rows(tmp_path / "rows.jsonl", rows)
    model = str(hostile_media / "model")
    command = [
        "build",
        str(tmp_path / "rows.jsonl"),
        "--tokenizer",
        model,
        "--chat-template",
        model,
    ]
    command += ["--processor", model, "--media-folder", str(hostile_media / "corpus")]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert reason in error
    assert "rows.jsonl:1: messages[0].content[0]" in error
    assert main([*command, "--out", str(tmp_path / "out"), "--skip-invalid"]) == 0
    assert len(Samples(tmp_path / "out")) == 1


BAD_AUDIO = {
    "rate": (encode_audio(random_audio(800), rate_hz=8000), "resample it"),
    "long": (encode_audio(random_audio(40_000)), "split it"),
    "short": (encode_audio(random_audio(100)), "too short"),
    "no sound": (b"RIFF", "not a WAV or FLAC file"),
    "cut off": (encode_audio(random_audio(8000))[:-2000], "truncated"),
    "cut flac": (encode_audio(random_audio(8000), "FLAC")[:-4000], "audio|FLAC"),
    "ogg": (encode_audio(random_audio(8000), "OGG"), "is not supported"),
}


@pytest.mark.parametrize("name", BAD_AUDIO)
def test_unusable_audio_is_refused(tmp_path: Path, name: str) -> None:
    """The error names the location and the remedy."""
    content, reason = BAD_AUDIO[name]
    write_model(tmp_path, WHISPER)
    with pytest.raises(ValueError, match=f"here: .*{reason}"):
        Processor.load(tmp_path).measure(EncodedFile("audio", content, "here"))


def test_stereo_is_mixed_down_to_the_channel_mean() -> None:
    stereo = np.stack([random_audio(800), random_audio(800, 1)], 1)
    samples, rate_hz = decode_audio(encode_audio(stereo))
    assert rate_hz == 16_000
    assert np.allclose(samples, stereo.astype(np.float32).mean(1) / 32768, atol=1e-7)


def test_decompression_bombs_are_refused_before_allocating() -> None:
    """The header claims more pixels than the limit."""
    side = int(IMAGE_PIXELS**0.5) + 1
    tracemalloc.start()
    with pytest.raises(ValueError, match="exceed the limit"):
        decode_image(png_claiming(side, side))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_images_without_a_processor_are_refused(vision_data: Path, tmp_path: Path) -> None:
    """The error names --processor. Preference pairs do not support media."""
    model = vision_data / "model"
    rows = vision_data / "corpus/rows.jsonl"
    with pytest.raises(CorpusError, match="--processor"):
        build(rows, tokenizer=model, out=tmp_path / "out", chat=model)
    with pytest.raises(SettingError, match="processor needs conversations"):
        build(rows, tokenizer=model, out=tmp_path / "out", chat=model, pairs=True, processor=model)


def test_templates_that_print_no_image_placeholder_are_refused(
    vision_data: Path, tmp_path: Path
) -> None:
    """A missing placeholder would shift all later images."""
    (tmp_path / "blind.jinja").write_text(VISION_TEMPLATE.replace("<|image_pad|>", "[picture]"))
    model = vision_data / "model"
    with pytest.raises(CorpusError, match=r"prints '<\|image_pad\|>' 0 times for 1 parts"):
        build(
            vision_data / "corpus",
            tokenizer=model,
            out=tmp_path / "out",
            chat=tmp_path / "blind.jinja",
            processor=model,
        )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "is not for Qwen-VL"),
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
def test_unsupported_processors_are_refused(tmp_path: Path, config: Any, reason: str) -> None:
    """The error names the file and the remedy."""
    write_model(tmp_path, config)
    with pytest.raises(TokenizerError, match=f"preprocessor_config.json: .*{reason}.*use the f"):
        Processor.load(tmp_path)


def test_sources_with_different_processors_are_refused(vision_data: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN3)
    build(
        vision_data / "corpus", tokenizer=model, out=tmp_path / "out", chat=model, processor=model
    )
    with pytest.raises(SettingError, match="different processors"):
        InstructionStream(
            {"a": vision_data / "shards", "b": tmp_path / "out"}, sequence_length=64, batch_size=1
        )


def test_changed_processor_settings_next_to_shards_are_detected(
    vision_data: Path, tmp_path: Path
) -> None:
    """The settings decide what the model reads, so the index holds their checksum."""
    shutil.copytree(vision_data / "shards", tmp_path / "copy")
    path = tmp_path / "copy/media.json"
    path.write_bytes(path.read_bytes().replace(b"0.48145466", b"0.48145467"))
    assert [str(fault) for fault in verify(tmp_path / "copy").faults] == [
        "media.json: file: with chat_template.jinja, with tokenizer_config.json, "
        "checksum differs from the index"
    ]
    with pytest.raises(DamageError, match=r"media.json: file"):
        InstructionStream(tmp_path / "copy", sequence_length=64, batch_size=1)


def test_the_spectrogram_of_silence_is_finite() -> None:
    """All values sit at the log floor, without NaN."""
    settings = msgspec.structs.replace(_audio_settings(WHISPER, "<|AUDIO|>"), chunk_s=1)
    spectrum = spectrogram(np.zeros(400, np.float32), settings)
    assert spectrum.shape == (128, 100)
    assert (spectrum == (-10 + 4) / 4).all()


def test_array_jobs_build_identical_media_shards(vision_data: Path, tmp_path: Path) -> None:
    """Media offsets are adjusted when the parts are merged."""
    model, out = vision_data / "model", tmp_path / "out"
    for shard in ("1/2", "2/2", "merge/2"):
        build(
            vision_data / "corpus",
            tokenizer=model,
            out=out,
            chat=model,
            processor=model,
            shard=shard,
        )
    for path in (vision_data / "shards").glob("shard-*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
