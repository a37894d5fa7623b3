"""Drops rows whose images are broken, blank, tiny or extreme, or contradict their text."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from ms_data.cleaning.languages import identify, language_detector
from ms_data.cleaning.rows import RowRule, decode_row
from ms_data.cleaning.rule import Drop, Outcome, library_version, over, under
from ms_data.cleaning.text import Text
from ms_data.media.images import check_pillow, decode_image
from ms_data.settings import flag, integer, number

_SIZE = re.compile(
    r"(?<![\d.])(\d{2,5})\s?[x\u00d7*]\s?(\d{2,5})(?:\s?(?:px|pixels|像素))", re.IGNORECASE
)


@frozen(kw_only=True)
class Pictures(RowRule):
    """Checks that the images of rows are intact, large and varied enough, and match their text."""

    name = "pictures"

    min_side: int = field(default=28, validator=integer(minimum=1))
    """Minimum length of the shorter side in pixels; a Qwen-VL token covers 28 x 28."""
    max_ratio: float = field(default=20.0, validator=number(minimum=1))
    """Maximum ratio of the longer to the shorter side."""
    min_contrast: float = field(default=2.0, validator=number(maximum=127))
    """Minimum standard deviation of the brightness (0 to 255); near 0 for a blank image."""
    near_bits: int | None = field(
        default=None, validator=integer(minimum=0, maximum=16, optional=True)
    )
    """Drop a row with an image whose 64-bit perceptual hash differs from an earlier one in at most
    this many bits; 3 finds copies of another size or quality. None: keep near-duplicates."""
    match_size: bool = field(default=True, validator=flag)
    """Drop a row with one image whose text states another size in pixels, such as `640x480 px`."""
    match_language: bool = field(default=False, validator=flag)
    """Drop a row whose `language` key, an ISO 639-1 code, differs from the language of its text."""

    def check(self) -> None:
        """Check that Pillow is installed, and resiliparse if languages are compared."""
        super().check()
        check_pillow()
        if self.match_language:
            language_detector()

    def identity(self) -> str:
        """Return the versions of the libraries."""
        resiliparse = f" {library_version('Resiliparse')}" if self.match_language else ""
        return library_version("pillow") + resiliparse

    def apply(self, text: Text, /) -> Outcome:
        """Drop a row for its first bad image."""
        row = decode_row(text)
        try:
            images = [decode_image(file.content) for file in self.files(row, "image")]
        except ValueError as error:
            return Drop("broken", str(error)[:200], "whole")
        for image in images:
            if drop := self._judge(image):
                return drop
        row_text = " ".join(_texts(row["messages"]))  # without the paths of media
        if self.match_size and len(images) == 1 and (sizes := _SIZE.findall(row_text)):
            size = images[0].size
            # In any order.
            if not any({int(width), int(height)} == set(size) for width, height in sizes):
                return Drop("match_size", "x".join(sizes[0]), "x".join(map(str, size)))
        expected = row.get("language")
        if self.match_language and isinstance(expected, str):
            language = identify(row_text)
            if language not in (expected, "unknown"):
                return Drop("match_language", language, expected)
        return None

    def _judge(self, image: Any) -> Drop | None:
        short, long = sorted(image.size)
        return (
            under("min_side", short, self.min_side)
            or over("max_ratio", long / short, self.max_ratio)
            or under("min_contrast", _contrast(image), self.min_contrast)
        )


def _contrast(image: Any) -> float:
    """Return the standard deviation of an image's brightness."""
    return float(np.asarray(image.convert("L"), np.float32).std())


def _texts(messages: list[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        for part in content if isinstance(content, list) else []:
            if part["type"] == "text":
                yield part["text"]


RULE = Pictures
