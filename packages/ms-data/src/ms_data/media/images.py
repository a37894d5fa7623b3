"""Decodes images, and converts them and the frames of videos to the patches of Qwen-VL.

Numerically identical to transformers' `Qwen2VLImageProcessorPil`: rotate by EXIF orientation,
convert to RGB with transparency on white, resize bicubically to multiples of a token's pixels
within bounds on the total, rescale, normalize, and cut into patches in token order.
"""

import io
import math
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ms_data.errors import SettingError
from ms_data.media.settings import IMAGE_PIXELS, ImageSettings, VideoSettings

FORMATS = ("PNG", "JPEG")
"""Supported formats; all other decoders are disabled."""

MAX_ASPECT_RATIO = 200
"""Qwen-VL rejects larger aspect ratios."""

_EDGE = 1 << 16


class Grid(NamedTuple):
    """Number of patches of an image in time, height and width."""

    time: int
    height: int
    width: int

    def tokens(self, settings: ImageSettings) -> int:
        """Return the number of tokens of the image."""
        return self.time * self.height * self.width // settings.merge_size**2


def decode_image(content: bytes) -> Any:
    """Decode a PNG or JPEG image; return an upright `PIL.Image.Image` in RGB.

    Raises:
        ValueError: the content has another format, is broken or truncated, or its header declares
            more than `IMAGE_PIXELS` pixels.
        SettingError: Pillow is not installed.
    """
    image_module, operations = _library("PIL.Image"), _library("PIL.ImageOps")
    try:
        image = image_module.open(io.BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height > IMAGE_PIXELS or max(width, height) > _EDGE:
            raise ValueError(f"{width} x {height} pixels exceed the limit of {IMAGE_PIXELS}")
        image.load()
        # Like transformers' load_image.
        upright = operations.exif_transpose(image).convert("RGB")
        if upright.info.get("transparency") is None:
            return upright
        # A transparent color survives the conversion to RGB; the processor makes it white.
        white = image_module.new("RGBA", upright.size, (255, 255, 255, 255))
        return image_module.alpha_composite(white, upright.convert("RGBA")).convert("RGB")
    except image_module.UnidentifiedImageError:
        raise ValueError("not a PNG or JPEG image; convert it") from None
    except image_module.DecompressionBombError as error:  # Pillow's own, larger limit
        raise ValueError(f"more pixels than the limit of {IMAGE_PIXELS}") from error
    except MemoryError as error:
        raise ValueError("an image that needs more memory than available") from error
    except Exception as error:  # Pillow's decoders raise many types on bad content
        raise ValueError(f"a broken image: {_reason(error)}") from error


def patch_grid(width: int, height: int, settings: ImageSettings) -> Grid:
    """Compute the patch grid of an image, like `smart_resize` of Qwen-VL.

    Raises:
        ValueError: the aspect ratio exceeds 200.
    """
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            f"{width} x {height} pixels: the model rejects aspect ratios above {MAX_ASPECT_RATIO}"
        )
    # Round both sides to multiples of a token, then scale the area into its bounds.
    factor = settings.factor
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > settings.max_pixels:
        shrink = math.sqrt((height * width) / settings.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    if new_height * new_width > 2 * IMAGE_PIXELS:  # a thin image, whose short side is rounded up
        raise ValueError(
            f"{width} x {height} pixels are resized to {new_width} x {new_height}, too many"
        )
    return Grid(1, new_height // settings.patch_size, new_width // settings.patch_size)


def image_patches(image: Any, settings: ImageSettings) -> NDArray[np.float32]:
    """Convert a decoded image to patches.

    Returns:
        Shape (patches, 3 x temporal_patch_size x patch_size²). Patches of one token are adjacent,
        and the single frame is repeated in time.
    """
    width, height = image.size
    frame = _normalized(image, patch_grid(width, height, settings), settings)
    return _patches(np.broadcast_to(frame, (settings.temporal_patch_size, *frame.shape)), settings)


def video_grid(frames: int, width: int, height: int, settings: VideoSettings) -> Grid:
    """Compute the patch grid of a video's sampled frames.

    Raises:
        ValueError: the aspect ratio exceeds 200.
    """
    grid = patch_grid(width, height, settings.per_frame(frames))
    return Grid(-(-frames // settings.temporal_patch_size), grid.height, grid.width)


def video_patches(frames: NDArray[np.uint8], settings: VideoSettings) -> NDArray[np.float32]:
    """Convert the sampled frames of a video to patches.

    Args:
        frames: RGB, shape (frames, height, width, 3); the last is repeated to complete a patch.
        settings: settings of the model's video processor.

    Returns:
        Shape (patches, 3 x temporal_patch_size x patch_size²), in the order of time and then as
        those of images.
    """
    grid = video_grid(len(frames), frames.shape[2], frames.shape[1], settings)
    from_array, depth = _library("PIL.Image").fromarray, settings.temporal_patch_size
    parts = []
    for time in range(grid.time):
        indices = np.minimum(np.arange(depth) + time * depth, len(frames) - 1)
        group = [_normalized(from_array(frames[index]), grid, settings) for index in indices]
        parts.append(_patches(np.stack(group), settings))
    return np.concatenate(parts)


def _normalized(image: Any, grid: Grid, settings: ImageSettings) -> NDArray[np.float32]:
    """Resize, rescale and normalize an image, to shape (height, width, 3)."""
    size = (grid.width * settings.patch_size, grid.height * settings.patch_size)
    bicubic = _library("PIL.Image").Resampling.BICUBIC
    pixels: NDArray[np.uint8] = np.asarray(image.resize(size, resample=bicubic), np.uint8)
    # like transformers, in this order of types
    scaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    normal: NDArray[np.float32] = scaled - np.array(settings.mean, np.float32)
    normal /= np.array(settings.std, np.float32)
    return normal


def _patches(frames: NDArray[np.float32], settings: ImageSettings) -> NDArray[np.float32]:
    """Cut the frames of one temporal patch, (time, height, width, 3), into patches."""
    side, merge = settings.patch_size, settings.merge_size
    rows, columns = (length // (side * merge) for length in frames.shape[1:3])
    # (time, row, merge, y, column, merge, x, channel)
    blocks = frames.reshape(-1, rows, merge, side, columns, merge, side, 3)
    # row, column, merge, merge, channel, time, y, x
    return blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(-1, settings.width)


def check_pillow() -> None:
    """Check that images can be decoded.

    Raises:
        SettingError: Pillow is not installed.
    """
    _library("PIL.Image")


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise SettingError("images need Pillow; pip install 'ms-data[media]'") from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
