"""Frames of videos: exact times, and limits that a hostile file cannot avoid."""

import io
import random
from typing import Any

import numpy as np
import pytest

from ms_data import VideoLimits, decode_video
from ms_data.errors import SettingError


def test_other_formats_and_bad_arguments_are_refused() -> None:
    """A playlist would name other files; nothing is probed."""
    for content in (b"", b"#EXTM3U\nfile:///etc/passwd\n", b"RIFF0000AVI "):
        with pytest.raises(ValueError, match="not an MP4 or WebM file"):
            decode_video(content)
    with pytest.raises(SettingError, match="frames_per_s must be above 0"):
        decode_video(b"", frames_per_s=0)
    with pytest.raises(SettingError, match="frames must be"):
        VideoLimits(frames=0)


def encoded(frames: int, rate: int = 10, size: tuple[int, int] = (48, 64), **options: Any) -> bytes:
    """A lossless video whose frame n has the gray value 2 n."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=options.pop("format", "mp4")) as container:
        stream = container.add_stream(options.pop("codec", "libx264rgb"), rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = options.pop("pix_fmt", "rgb24")
        stream.options = {"crf": "0"}
        for n in range(frames):
            image = np.full((*size, 3), 2 * n % 256, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 2.0, 3.0, 10.0, 25.0])
def test_frames_are_those_shown_at_or_after_each_time(rate: float) -> None:
    """Compared with the formula for a video of 10 frames per second."""
    video = decode_video(encoded(43), frames_per_s=rate)
    expected: list[int] = []
    for n in range(43):
        if n / 10 + 1e-9 >= len(expected) / rate:
            expected.append(n)
    assert video.frames.shape == (len(expected), 48, 64, 3)
    assert np.array_equal(video.frames[:, 5, 7, 1], [2 * n for n in expected])
    assert np.allclose(video.times_s, [n / 10 for n in expected], atol=1e-6)
    assert decode_video(encoded(9), height=24, width=16).frames.shape[1:] == (24, 16, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"frames": 3}, "more than 3 frames at"),
        ({"seconds": 2}, "more than 2 seconds"),
        ({"pixels": 48 * 64 - 1}, "64 x 48 pixels"),
    ],
)
def test_limits_hold(limits: dict[str, int], message: str) -> None:
    """On frames, seconds and pixels."""
    with pytest.raises(ValueError, match=message):
        decode_video(encoded(43), limits=VideoLimits(**limits))
    large = encoded(20, rate=2, size=(480, 640))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        decode_video(large, limits=VideoLimits(size_mib=1))


@pytest.mark.slow
def test_damaged_videos_are_refused_or_decoded_in_bounds() -> None:
    """Cut at 40 places and with 60 flipped bits: a ValueError of one line, or frames."""
    content = encoded(30)
    rng = random.Random(0)
    damaged = [content[: rng.randrange(12, len(content))] for _ in range(40)]
    for _ in range(60):
        changed = bytearray(content)
        changed[rng.randrange(12, len(content))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(changed))
    messages: list[str] = []
    for video in damaged:
        try:
            assert decode_video(video).frames.shape[1:] == (48, 64, 3)
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)
