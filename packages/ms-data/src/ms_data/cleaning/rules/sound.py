"""Drops rows whose audio is broken, silent, clipped, too short or too long."""

import math

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ms_data.cleaning.rows import RowRule, decode_row
from ms_data.cleaning.rule import Drop, Outcome, library_version, over, under
from ms_data.cleaning.text import Text
from ms_data.media.audio import check_soundfile, decode_audio
from ms_data.settings import number

_FULL = 0.999  # full scale, with a margin for rounding


@frozen(kw_only=True)
class Sound(RowRule):
    """Checks that the audio of rows is intact, loud enough, not clipped, and of suitable length."""

    name = "sound"

    min_s: float = field(default=0.1, validator=number())
    """Minimum length in seconds."""
    max_s: float = field(default=30.0, validator=number())
    """Maximum length in seconds; Whisper processes 30."""
    silence_db: float = field(default=60.0, validator=number(maximum=200))
    """Audio with an average level more than this many decibels below full scale is silent."""
    max_clipped: float = field(default=0.01, validator=number(maximum=1))
    """Maximum fraction of samples at full scale."""

    def check(self) -> None:
        """Check that soundfile is installed."""
        super().check()
        check_soundfile()

    def identity(self) -> str:
        """Return the version of soundfile."""
        return library_version("soundfile")

    def apply(self, text: Text, /) -> Outcome:
        """Drop a row for its first bad audio clip."""
        try:
            files = self.files(decode_row(text), "audio")
            clips = [decode_audio(file.content) for file in files]
        except ValueError as error:
            return Drop("broken", str(error)[:200], "whole")
        for samples, rate_hz in clips:
            if drop := self._judge(samples, rate_hz):
                return drop
        return None

    def _judge(self, samples: NDArray[np.float32], rate_hz: int) -> Drop | None:
        seconds = len(samples) / rate_hz
        power = float(np.square(samples, dtype=np.float64).mean())
        level_db = -10 * math.log10(max(power, 1e-30))  # decibels below full scale
        return (
            under("min_s", seconds, self.min_s)
            or over("max_s", seconds, self.max_s)
            or over("silence_db", level_db, self.silence_db)
            or over("max_clipped", float((np.abs(samples) >= _FULL).mean()), self.max_clipped)
        )


RULE = Sound
