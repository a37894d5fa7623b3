"""Decodes images, and converts them to the patches of Qwen-VL.

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
from ms_data.media.settings import IMAGE_PIXELS, ImageSettings

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
    grid = patch_grid(width, height, settings)
    side, merge = settings.patch_size, settings.merge_size
    size = (grid.width * side, grid.height * side)
    bicubic = _library("PIL.Image").Resampling.BICUBIC
    pixels: NDArray[np.uint8] = np.asarray(image.resize(size, resample=bicubic), np.uint8)
    # like transformers, in this order of types
    scaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    normal = (scaled - np.array(settings.mean, np.float32)) / np.array(settings.std, np.float32)
    rows, columns = grid.height // merge, grid.width // merge
    # (row, merge, y, column, merge, x, channel)
    blocks = normal.reshape(rows, merge, side, columns, merge, side, 3)
    patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # row, column, merge, merge, channel, y, x
    repeated: NDArray[np.float32] = np.broadcast_to(
        patches[:, :, :, :, :, None],
        (*patches.shape[:5], settings.temporal_patch_size, side, side),
    )
    return repeated.reshape(grid.height * grid.width, settings.width)


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
