"""Drops rows whose pictures are broken, blank, tiny or extreme, or not what their text says."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from ms_data.cleaning.languages import detector, identify
from ms_data.cleaning.rows import RowRule, row_of
from ms_data.cleaning.rule import Drop, Outcome, library_version, over, under
from ms_data.cleaning.text import Text
from ms_data.media.pictures import decode_picture, need_pillow
from ms_data.settings import flag, number, whole

_SIZE = re.compile(
    r"(?<![\d.])(\d{2,5})\s?[x\u00d7*]\s?(\d{2,5})(?:\s?(?:px|pixels|像素))", re.IGNORECASE
)


@frozen(kw_only=True)
class Pictures(RowRule):
    """Looks at the pictures of rows: whole, large and varied enough, and as their text says."""

    name = "pictures"

    min_side: int = field(default=28, validator=whole(least=1))
    """Pixels of the shorter side; a token of Qwen-VL has 28."""
    max_ratio: float = field(default=20.0, validator=number(least=1))
    """How many times as long as the other a side may be."""
    min_contrast: float = field(default=2.0, validator=number(most=127))
    """Standard deviation of its brightness from 0 to 255; a blank picture has next to none."""
    near_bits: int | None = field(default=None, validator=whole(least=0, most=16, optional=True))
    """Drop a row with a picture that differs from one before by so few of 64 bits of a hash; 3 is
    a copy of another size or quality. None looks for no near-duplicates."""
    match_size: bool = field(default=True, validator=flag)
    """Drop a row of one picture whose text says another size in pixels, as `640x480 px`."""
    match_language: bool = field(default=False, validator=flag)
    """Drop a row whose member `language`, an ISO 639-1 code, is not that of its text."""

    def check(self) -> None:
        """Need Pillow, and resiliparse for languages."""
        super().check()
        need_pillow()
        if self.match_language:
            detector()

    def identity(self) -> str:
        """Return the versions of the libraries."""
        more = f" {library_version('Resiliparse')}" if self.match_language else ""
        return library_version("pillow") + more

    def apply(self, text: Text, /) -> Outcome:
        """Drop a row for the first of its pictures that is not good."""
        row = row_of(text)
        try:
            pictures = [decode_picture(one.content) for one in self.files(row, "image")]
        except ValueError as error:
            return Drop("broken", str(error)[:200], "whole")
        for picture in pictures:
            if found := self._judge(picture):
                return found
        said = " ".join(_texts(row["messages"]))
        if self.match_size and len(pictures) == 1 and (sizes := _SIZE.findall(said)):
            size = pictures[0].size
            if not any({int(one), int(other)} == set(size) for one, other in sizes):
                return Drop("match_size", "x".join(sizes[0]), "x".join(map(str, size)))
        wanted = row.get("language")
        if self.match_language and isinstance(wanted, str):
            found_language = identify(said)
            if found_language not in (wanted, "unknown"):
                return Drop("match_language", found_language, wanted)
        return None

    def _judge(self, picture: Any) -> Drop | None:
        short, long = sorted(picture.size)
        return (
            under("min_side", short, self.min_side)
            or over("max_ratio", long / short, self.max_ratio)
            or under("min_contrast", _contrast(picture), self.min_contrast)
        )


def _contrast(picture: Any) -> float:
    """Return the standard deviation of a picture's brightness."""
    return float(np.asarray(picture.convert("L"), np.float32).std())


def _texts(messages: list[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        for part in content if isinstance(content, list) else []:
            if part["type"] == "text":
                yield part["text"]


RULE = Pictures
