"""Decodes video with PyAV and samples frames at a fixed rate, within limits.

The container format is selected by magic bytes instead of probing, so that a playlist or reference
cannot open another file. Limits apply to decoded data, as headers may be wrong: the size of each
frame is checked before its pixels are converted, and decoding ends at the maximum frame count.
"""

import io
import math
from fractions import Fraction
from importlib import import_module
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ms_data.errors import SettingError
from ms_data.media.settings import MAX_FRAME_RATE
from ms_data.settings.arguments import check_counts

CONTAINERS = {(4, b"ftyp"): "mp4", (0, b"\x1aE\xdf\xa3"): "matroska"}
"""Formats of FFmpeg by (offset, magic bytes); matroska includes WebM."""


@frozen(kw_only=True)
class VideoLimits:
    """Limits on a video.

    Raises:
        SettingError: a limit is below 1.
    """

    seconds: int = 600
    """Maximum duration in seconds."""
    frames: int = 768
    """Maximum number of sampled frames."""
    pixels: int = 4096 * 2304
    """Maximum number of pixels per encoded frame."""
    size_mib: int = 512
    """Maximum size of the sampled frames, in MiB."""

    def __attrs_post_init__(self) -> None:
        check_counts(
            seconds=self.seconds, frames=self.frames, pixels=self.pixels, size_mib=self.size_mib
        )


@frozen(eq=False)
class Video:
    """Sampled frames of a video."""

    frames: NDArray[np.uint8] = field(repr=False)
    """RGB, shape (frames, height, width, 3)."""
    times_s: NDArray[np.float64]
    """Presentation time of each frame, in seconds after the first."""


def decode_video(
    content: bytes,
    *,
    frames_per_s: float = 2.0,
    height: int | None = None,
    width: int | None = None,
    limits: VideoLimits | None = None,
) -> Video:
    """Decode an MP4 or WebM file and sample its frames at a fixed rate.

    Frame k is the first frame shown at or after k / frames_per_s seconds. Frames are decoded
    by one thread, so results do not depend on the machine's cores.

    Args:
        content: the encoded file.
        frames_per_s: sampled frames per second.
        height: height of the frames in pixels; None keeps it.
        width: width of the frames in pixels; None keeps it.
        limits: limits on the video; None for the defaults.

    Raises:
        ValueError: another format, a broken or truncated file, or one beyond the limits.
        SettingError: PyAV is not installed, or an argument is out of range.
    """
    limits = limits or VideoLimits()
    if not (isinstance(frames_per_s, int | float) and 0 < frames_per_s <= MAX_FRAME_RATE):
        raise SettingError(
            f"frames_per_s must be above 0 and at most {MAX_FRAME_RATE}, got {frames_per_s!r}"
        )
    check_counts(height=height or 1, width=width or 1)
    container_name = next(
        (
            name
            for (offset, magic), name in CONTAINERS.items()
            if content[offset:].startswith(magic)
        ),
        None,
    )
    if container_name is None:
        raise ValueError("not an MP4 or WebM file; convert it to one of these")
    av = _library()
    try:
        with av.open(io.BytesIO(content), format=container_name) as container:
            return _sample(container, frames_per_s, height, width, limits)
    except (av.error.FFmpegError, EOFError, UnicodeError) as error:
        raise ValueError(f"a broken video: {' '.join(str(error).split())[:200]}") from error
    except MemoryError as error:
        raise ValueError("a video that needs more memory than available") from error


def _sample(
    container: Any, frames_per_s: float, height: int | None, width: int | None, limits: VideoLimits
) -> Video:
    if not container.streams.video:
        raise ValueError("a file without a video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise ValueError("a video in an unknown codec; convert it to H.264, VP9 or AV1")
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    _check_pixels(stream.codec_context, limits)
    frames: list[NDArray[np.uint8]] = []
    times: list[float] = []
    first_s: float | None = None
    shape = (height or stream.codec_context.height, width or stream.codec_context.width)
    for number, frame in enumerate(container.decode(stream)):
        if number >= limits.seconds * MAX_FRAME_RATE:
            raise ValueError(f"a video of more than {number} frames")
        if frame.pts is None:
            raise ValueError("a frame without a time stamp")
        time_s = float(frame.pts * Fraction(frame.time_base))
        first_s = time_s if first_s is None else first_s
        if time_s - first_s > limits.seconds:
            raise ValueError(f"a video of more than {limits.seconds} seconds")
        # The frame size may change within a stream.
        _check_pixels(frame, limits)
        due_s = len(frames) / frames_per_s
        if time_s - first_s + 1e-9 < due_s:
            continue
        if len(frames) == limits.frames:
            raise ValueError(
                f"a video with more than {limits.frames} frames at {frames_per_s} per second"
            )
        if math.prod(shape) * 3 * (len(frames) + 1) > limits.size_mib << 20:
            raise ValueError(f"frames of more than {limits.size_mib} MiB")
        frames.append(frame.to_ndarray(format="rgb24", height=shape[0], width=shape[1]))
        times.append(time_s - first_s)
    if not frames:
        raise ValueError("a video without frames")
    return Video(np.stack(frames), np.array(times))


def _check_pixels(sized: Any, limits: VideoLimits) -> None:
    if not 0 < sized.width * sized.height <= limits.pixels:
        raise ValueError(
            f"frames of {sized.width} x {sized.height} pixels, and the limit is {limits.pixels}"
        )


def _library() -> Any:
    try:
        return import_module("av")
    except ImportError as error:
        raise SettingError("video needs PyAV; pip install 'ms-data[video]'") from error
