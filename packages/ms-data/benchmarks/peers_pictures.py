"""Turn images into Qwen2-VL patches, compared with transformers and bare Pillow.

    python benchmarks/peers_pictures.py --folder /usr/share/doc

Reads all PNG and JPEG files below the folder, from their bytes in memory, alternating. Every patch
value is compared before timing. Results are images and megapixels per CPU second of one thread,
medians over the rounds.
"""

import argparse
import io
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ms_data.media.images import decode_image, image_patches
from ms_data.media.settings import ImageSettings

PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
"""Limits on an image's pixels; the upper one is from Qwen2-VL's documentation."""


def find_images(folder: Path, limit: int) -> list[bytes]:
    """Return distinct images that both sides accept."""
    images: dict[bytes, None] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg") or not path.is_file():
            continue
        content = path.read_bytes()
        try:
            width, height = decode_image(content).size
        except ValueError:
            continue
        if min(width, height) >= 56 and max(width, height) <= 100 * min(width, height):
            images[content] = None
        if len(images) == limit:
            break
    return list(images)


def decode_with_pillow(content: bytes, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Decode with Pillow alone: RGB and resized, without patches."""
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    return np.asarray(picture.resize(size, resample=Image.Resampling.BICUBIC))


def cpu_s(work: Callable[[], object]) -> float:
    """Return CPU seconds of one call, over all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Compare, then time all sides alternately."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--most", type=int, default=200, help="maximum number of images")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    options = parser.parse_args()
    files = find_images(options.folder, options.most)
    if not files:
        parser.error(f"{options.folder} holds no PNG or JPEG; set another --folder")
    processor = Qwen2VLImageProcessorPil(**PIXELS, patch_size=14, merge_size=2)
    settings = ImageSettings(
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        token="<|image_pad|>",
        rescale_factor=processor.rescale_factor,
        **PIXELS,
    )
    sizes: list[tuple[int, int]] = []
    megapixels = 0.0
    for content in files:
        theirs = processor([load_image(Image.open(io.BytesIO(content)))], return_tensors="np")
        ours = image_patches(decode_image(content), settings)
        assert np.array_equal(ours, theirs["pixel_values"])
        _, rows, columns = theirs["image_grid_thw"][0].tolist()
        sizes.append((columns * 14, rows * 14))
        width, height = Image.open(io.BytesIO(content)).size
        megapixels += width * height / 1e6
    print(f"{len(files)} pictures, {megapixels:.1f} megapixels, all values equal", flush=True)
    tasks: dict[str, Callable[[], object]] = {
        "ms-data": lambda: [
            image_patches(decode_image(image_bytes), settings) for image_bytes in files
        ],
        "transformers, Pillow backend": lambda: [
            processor([load_image(Image.open(io.BytesIO(image_bytes)))], return_tensors="np")
            for image_bytes in files
        ],
        "Pillow alone: decoded and resized": lambda: [
            decode_with_pillow(image_bytes, size)
            for image_bytes, size in zip(files, sizes, strict=True)
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(options.rounds):
        for name, work in tasks.items():
            times[name].append(cpu_s(work))
    for name, seconds in times.items():
        cpu = statistics.median(seconds)
        print(f"{name:34} {len(files) / cpu:7.1f} pictures, {megapixels / cpu:6.1f} MP per CPU s")


if __name__ == "__main__":
    main()
