"""Decodes pictures, and makes the patches that Qwen-VL reads.

Equal to transformers' `Qwen2VLImageProcessorPil`, number for number: the picture turned as its
EXIF data says, RGB, a transparent colour made white, resized bicubically to multiples of a token's
pixels between two bounds on their number, scaled, normalised, and cut into patches that stand token
by token.
"""

import io
import math
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ms_data.errors import SettingError
from ms_data.media.settings import PICTURE_PIXELS, PictureSettings

FORMATS = ("PNG", "JPEG")
"""What is read; every other decoder stays out of reach."""

EXTREME_RATIO = 200
"""Longer pictures are refused by Qwen-VL."""

_EDGE = 1 << 16


class Grid(NamedTuple):
    """How many patches a picture has: in time, down and across."""

    time: int
    height: int
    width: int

    def tokens(self, settings: PictureSettings) -> int:
        """Count the tokens that stand for the picture."""
        return self.time * self.height * self.width // settings.merge_size**2


def decode_picture(content: bytes) -> Any:
    """Decode a whole picture of PNG or JPEG; return a `PIL.Image.Image` in RGB, turned upright.

    Raises:
        ValueError: it is neither, is broken or cut off, or has more pixels than
            `PICTURE_PIXELS`, which its head says before memory is taken.
        SettingError: Pillow is not installed.
    """
    image_module, operations = _library("PIL.Image"), _library("PIL.ImageOps")
    try:
        picture = image_module.open(io.BytesIO(content), formats=FORMATS)
        width, height = picture.size
        if width * height > PICTURE_PIXELS or max(width, height) > _EDGE:
            raise ValueError(f"{width} x {height} are more pixels than any that is read")
        picture.load()
        # As transformers' load_image does, so that a picture lies as people see it.
        upright = operations.exif_transpose(picture).convert("RGB")
        if upright.info.get("transparency") is None:
            return upright
        # A colour that stands for transparent outlives that, and becomes white in its processor.
        white = image_module.new("RGBA", upright.size, (255, 255, 255, 255))
        return image_module.alpha_composite(white, upright.convert("RGBA")).convert("RGB")
    except image_module.UnidentifiedImageError:
        raise ValueError("no picture of PNG or JPEG; convert it") from None
    except image_module.DecompressionBombError as error:  # Pillow's own, larger limit
        raise ValueError("more pixels than any that is read") from error
    except MemoryError as error:
        raise ValueError("a picture that asks for more memory than there is") from error
    except Exception as error:  # its decoders raise whatever content makes them
        raise ValueError(f"a broken picture: {_words(error)}") from error


def grid_of(width: int, height: int, settings: PictureSettings) -> Grid:
    """Compute the patches of a picture of so many pixels, as `smart_resize` of Qwen-VL does.

    Raises:
        ValueError: one side is over 200 times as long as the other.
    """
    if max(width, height) > EXTREME_RATIO * min(width, height):
        raise ValueError(
            f"{width} x {height} pixels: one side is over {EXTREME_RATIO} times the other, which "
            "the model refuses"
        )
    factor = settings.factor
    down, across = round(height / factor) * factor, round(width / factor) * factor
    if down * across > settings.max_pixels:
        shrink = math.sqrt((height * width) / settings.max_pixels)
        down = max(factor, math.floor(height / shrink / factor) * factor)
        across = max(factor, math.floor(width / shrink / factor) * factor)
    elif down * across < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        down = math.ceil(height * grow / factor) * factor
        across = math.ceil(width * grow / factor) * factor
    if down * across > 2 * PICTURE_PIXELS:  # a long, thin one, whose short side is rounded up
        raise ValueError(f"{width} x {height} pixels become {across} x {down}, which is too many")
    return Grid(1, down // settings.patch_size, across // settings.patch_size)


def patches_of(picture: Any, settings: PictureSettings) -> NDArray[np.float32]:
    """Make the patches of a decoded picture.

    Returns:
        Shape (patches, 3 x temporal_patch_size x patch_size²); patches of one token stand
        together, and the one frame is repeated in time.
    """
    width, height = picture.size
    grid = grid_of(width, height, settings)
    side, merge = settings.patch_size, settings.merge_size
    size = (grid.width * side, grid.height * side)
    bicubic = _library("PIL.Image").Resampling.BICUBIC
    pixels: NDArray[np.uint8] = np.asarray(picture.resize(size, resample=bicubic), np.uint8)
    scaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    normal = (scaled - np.array(settings.mean, np.float32)) / np.array(settings.std, np.float32)
    down, across = grid.height // merge, grid.width // merge
    blocks = normal.reshape(down, merge, side, across, merge, side, 3)
    patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # down, across, merge, merge, channel, y, x
    repeated: NDArray[np.float32] = np.broadcast_to(
        patches[:, :, :, :, :, None],
        (*patches.shape[:5], settings.temporal_patch_size, side, side),
    )
    return repeated.reshape(grid.height * grid.width, settings.width)


def check_pillow() -> None:
    """Find out whether pictures can be decoded.

    Raises:
        SettingError: Pillow is not installed.
    """
    _library("PIL.Image")


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise SettingError("Pillow is needed for pictures; pip install 'ms-data[media]'") from error


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
