"""Videos in conversations: frames, token counts and positions equal an independent computation."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from ms_data import InstructionStream, Processor, Samples, build, decode_video
from ms_data.media.images import Grid, image_patches, video_grid, video_patches
from ms_data.media.processor import MediaItem
from ms_data.media.settings import VideoSettings, read_settings
from ms_data.streams.media import _positions_thw

from .chat_templates import write_rows
from .media_samples import QWEN2, VISION_TEMPLATE, media_row, random_image, write_model

QWEN2_VIDEO = {
    **QWEN2,
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
    "min_pixels": 56 * 56,
    "max_pixels": 112 * 112,
}
TEMPLATE = VISION_TEMPLATE.replace(
    "{% elif 'audio' in part %}",
    "{% elif 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'audio' in part %}",
)


def video_model(folder: Path, model_type: str = "qwen2_vl", **video: Any) -> Path:
    """Write a model folder with a video processor."""
    write_model(folder, QWEN2, TEMPLATE)
    settings = {**QWEN2_VIDEO, **video}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    vision = {"tokens_per_second": 2} if model_type == "qwen2_5_vl" else {}
    config = {"model_type": model_type, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def video_settings(folder: Path, **video: Any) -> VideoSettings:
    settings = read_settings(video_model(folder, **video)).videos
    assert settings is not None
    return settings


def naive_patches(frames: NDArray[np.uint8], settings: VideoSettings) -> NDArray[np.float32]:
    """Loop over every patch of every token, as the layout is defined."""
    grid = video_grid(len(frames), frames.shape[2], frames.shape[1], settings)
    side, merge, depth = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    size = (grid.width * side, grid.height * side)
    resized = [
        np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC))
        for frame in frames
    ]
    resized += [resized[-1]] * (-len(resized) % depth)
    pixels = (np.stack(resized).astype(np.float64) * settings.rescale_factor).astype(np.float32)
    pixels = (pixels - np.float32(settings.mean)) / np.float32(settings.std)
    patches = []
    for time in range(grid.time):
        for token_row in range(grid.height // merge):
            for token_column in range(grid.width // merge):
                for row in range(token_row * merge, (token_row + 1) * merge):
                    for column in range(token_column * merge, (token_column + 1) * merge):
                        block = pixels[
                            time * depth : (time + 1) * depth,
                            row * side : (row + 1) * side,
                            column * side : (column + 1) * side,
                        ]
                        patches.append(block.transpose(3, 0, 1, 2).flatten())
    return np.stack(patches)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_patches_of_a_video_equal_a_loop_over_patches(tmp_path: Path, count: int) -> None:
    """Also with an odd number of frames, and as those of an image if all frames are equal."""
    settings = video_settings(tmp_path)
    frames = np.stack([random_image(70, 50, seed) for seed in range(count)])
    patches = video_patches(frames, settings)
    assert np.array_equal(patches, naive_patches(frames, settings))
    if count == 1:
        assert np.array_equal(patches, image_patches(Image.fromarray(frames[0]), settings))


def test_a_cap_on_pixels_divides_the_context_among_frames(tmp_path: Path) -> None:
    """By the formula of qwen-vl-utils."""
    settings = video_settings(tmp_path, cap_pixels_per_frame=True, max_video_tokens=40)
    total = int(40 * 28 * 28 * 0.9)
    assert settings.per_frame(2).max_pixels == min(112 * 112, total * 2 // 2)
    assert settings.per_frame(10).max_pixels == max(total * 2 // 10, int(56 * 56 * 1.05))


def test_videos_of_other_models_are_not_supported(tmp_path: Path) -> None:
    """Qwen3-VL writes time stamps between frames; its pictures stay supported."""
    for index, (model_type, class_name) in enumerate(
        [("qwen3_vl", "Qwen3VLVideoProcessor"), ("qwen3_vl", "Qwen2VLVideoProcessor")]
    ):
        folder = video_model(tmp_path / str(index), model_type, video_processor_type=class_name)
        settings = read_settings(folder)
        assert settings.pictures is not None
        assert settings.videos is None


def published_positions(
    kinds: list[int], grids: dict[int, list[Grid]], merge: int, steps: list[float]
) -> NDArray[np.int64]:
    """Positions by the rule of the paper: each part starts after the largest position before it."""
    grid_iterators = {kind: iter(of_kind) for kind, of_kind in grids.items()}
    step_iterator, parts, index = iter(steps), [], 0
    following = 0
    while index < len(kinds):
        kind = kinds[index]
        stop = index
        while stop < len(kinds) and kinds[stop] == kind:
            stop += 1
        if kind == 0:
            part = np.tile(np.arange(stop - index), (3, 1)) + following
        else:
            grid = next(grid_iterators[kind])
            step = next(step_iterator) if kind == 2 else 1.0
            cells = [
                (int(time * step), row, column)
                for time in range(grid.time)
                for row in range(grid.height // merge)
                for column in range(grid.width // merge)
            ]
            part = np.array(cells).T + following
        parts.append(part)
        following = int(part.max()) + 1
        index = stop
    return np.concatenate(parts, 1)


@pytest.mark.parametrize("step", [1.0, 2.0, 1.5])
def test_positions_follow_the_paper(step: float) -> None:
    """With an image before a video of more time positions than height and width."""
    from fractions import Fraction

    from ms_data.streams.media import _BatchItem

    image, video = Grid(1, 4, 6), Grid(7, 4, 4)
    kinds = [0] * 3 + [1] * 6 + [0] * 2 + [2] * 28 + [0] * 5
    items = [
        _BatchItem(MediaItem("image", b"x", 6, image), (0, 3, 9)),
        _BatchItem(MediaItem("video", b"x", 28, video), (0, 11, 39), Fraction(step)),
    ]
    positions = np.arange(len(kinds))[None]
    expected = published_positions(kinds, {1: [image], 2: [video]}, 2, [step])
    assert np.array_equal(_positions_thw(positions, items, 2)[:, 0], expected)


def encoded_video(frames: NDArray[np.uint8], rate: int = 4) -> bytes:
    """A lossless MP4 of these frames."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.options = "rgb24", {"crf": "0"}
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_conversations_with_videos_become_rows(tmp_path: Path, model_type: str) -> None:
    """Frames, grids, tokens and positions; packed with pictures and text; bad files are counted."""
    model = video_model(tmp_path / "model", model_type)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    contents, rows = [], []
    for index, count in enumerate([12, 5, 21]):
        frames = np.stack([random_image(64, 48, 10 * index + frame) for frame in range(count)])
        contents.append(encoded_video(frames))
        (corpus / f"{index}.mp4").write_bytes(contents[-1])
        parts = [{"type": "text", "text": "Now "}, {"type": "video", "video": f"{index}.mp4"}]
        rows.append(media_row([*parts, {"type": "text", "text": " what?"}], f"Waves, {index}."))
    (corpus / "cut.mp4").write_bytes(contents[0][:-700])
    (corpus / "empty.mp4").write_bytes(b"")
    rows += [media_row([{"type": "video", "path": name}]) for name in ("cut.mp4", "empty.mp4")]
    write_rows(corpus / "rows.jsonl", rows)
    out = tmp_path / "out"
    build(
        corpus / "rows.jsonl",
        tokenizer=model,
        out=out,
        chat=model,
        processor=model,
        skip_invalid=True,
    )
    samples = Samples(out)
    assert len(samples) == 3
    settings = Processor.load(model).settings.videos
    assert settings is not None
    stream = InstructionStream(out, sequence_length=256, batch_size=1, shuffle=False, epochs=1)
    seen = 0
    for batch in stream:
        for (row, start, stop), grid in zip(
            batch["video_places"], batch["video_grid_thw"], strict=True
        ):
            number = int(batch["documents"][row, start])
            inside = batch["documents"][row] == number
            content = next(
                content
                for index, content in enumerate(contents)
                if samples.media(index)[0].item.content == content
                and np.array_equal(samples.conversation(index).tokens, batch["tokens"][row][inside])
            )
            frames = decode_video(content).frames  # 2 per second
            assert grid.tolist() == list(video_grid(len(frames), 64, 48, settings))
            kinds = [0] * int(inside.sum())
            first = int(np.flatnonzero(inside)[0])
            kinds[start - first : stop - first] = [2] * (stop - start)
            # A temporal patch has 2 frames, 1 second: 2 positions in Qwen2.5-VL.
            steps = [2.0 if model_type == "qwen2_5_vl" else 1.0]
            expected = published_positions(kinds, {2: [Grid(*grid.tolist())]}, 2, steps)
            assert np.array_equal(batch["positions_thw"][:, row][:, inside], expected)
            patches = batch["pixel_values_videos"]
            offset = int(
                batch["video_grid_thw"]
                .prod(1)[: list(batch["video_places"][:, 1]).index(start)]
                .sum()
            )
            count = int(grid.prod())
            assert np.array_equal(patches[offset : offset + count], naive_patches(frames, settings))
            seen += 1
    assert seen == 3
