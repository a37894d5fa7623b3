"""Decodes pictures into patches as Qwen2-VL reads them, beside transformers and bare Pillow.

    python benchmarks/peers_pictures.py --folder /usr/share/doc

All PNG and JPEG files below the folder, each from its bytes in memory, in turns. The patches are
compared number by number before anything is timed. Figures are pictures and megapixels a CPU
second of one thread, the median of the rounds.
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

from ms_data.media.pictures import decode_picture, image_patches
from ms_data.media.settings import PictureSettings

PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
"""Bounds on a picture's size, the upper one as Qwen2-VL's documents give it."""


def pictures_below(folder: Path, most: int) -> list[bytes]:
    """The bytes of pictures of different content that both sides take."""
    found: dict[bytes, None] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg") or not path.is_file():
            continue
        content = path.read_bytes()
        try:
            width, height = decode_picture(content).size
        except ValueError:
            continue
        if min(width, height) >= 56 and max(width, height) <= 100 * min(width, height):
            found[content] = None
        if len(found) == most:
            break
    return list(found)


def bare(content: bytes, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """What Pillow alone takes: decoded, RGB and resized, without patches."""
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    return np.asarray(picture.resize(size, resample=Image.Resampling.BICUBIC))


def cpu_s(work: Callable[[], object]) -> float:
    """Processor seconds of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Compares, then times in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--most", type=int, default=200, help="pictures at most")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    options = parser.parse_args()
    files = pictures_below(options.folder, options.most)
    if not files:
        parser.error(f"{options.folder} holds no PNG or JPEG; give --folder")
    processor = Qwen2VLImageProcessorPil(**PIXELS, patch_size=14, merge_size=2)
    settings = PictureSettings(
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
        ours = image_patches(decode_picture(content), settings)
        assert np.array_equal(ours, theirs["pixel_values"])
        _, down, across = theirs["image_grid_thw"][0].tolist()
        sizes.append((across * 14, down * 14))
        width, height = Image.open(io.BytesIO(content)).size
        megapixels += width * height / 1e6
    print(f"{len(files)} pictures, {megapixels:.1f} megapixels, equal in every number", flush=True)
    works: dict[str, Callable[[], object]] = {
        "ms-data": lambda: [image_patches(decode_picture(one), settings) for one in files],
        "transformers, Pillow backend": lambda: [
            processor([load_image(Image.open(io.BytesIO(one)))], return_tensors="np")
            for one in files
        ],
        "Pillow alone: decoded and resized": lambda: [
            bare(one, size) for one, size in zip(files, sizes, strict=True)
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            times[name].append(cpu_s(work))
    for name, found in times.items():
        took = statistics.median(found)
        print(f"{name:34} {len(files) / took:7.1f} pictures, {megapixels / took:6.1f} MP a CPU s")


if __name__ == "__main__":
    main()
