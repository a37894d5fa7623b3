"""Drops rows whose sounds are broken, silent, clipped, too short or too long."""

import math

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ms_data.cleaning.rows import RowRule, row_of
from ms_data.cleaning.rule import Drop, Outcome, library_version, over, under
from ms_data.cleaning.text import Text
from ms_data.media.sound import decode_sound, need_soundfile
from ms_data.settings import number

_FULL = 0.999


@frozen(kw_only=True)
class Sound(RowRule):
    """Looks at the sounds of rows: whole, loud enough, not clipped, neither short nor long."""

    name = "sound"

    min_s: float = field(default=0.1, validator=number())
    """Seconds of the shortest."""
    max_s: float = field(default=30.0, validator=number())
    """Seconds of the longest; Whisper hears 30."""
    silence_db: float = field(default=60.0, validator=number(most=200))
    """How many decibels below full level a sound may be on average; one below that is silent."""
    max_clipped: float = field(default=0.01, validator=number(most=1))
    """Share of samples at full level."""

    def check(self) -> None:
        """Need soundfile."""
        super().check()
        need_soundfile()

    def identity(self) -> str:
        """Return the version of soundfile."""
        return library_version("soundfile")

    def apply(self, text: Text, /) -> Outcome:
        """Drop a row for the first of its sounds that is not good."""
        try:
            files = self.files(row_of(text), "audio")
            sounds = [decode_sound(one.content) for one in files]
        except ValueError as error:
            return Drop("broken", str(error)[:200], "whole")
        for samples, rate_hz in sounds:
            if found := self._judge(samples, rate_hz):
                return found
        return None

    def _judge(self, samples: NDArray[np.float32], rate_hz: int) -> Drop | None:
        seconds = len(samples) / rate_hz
        power = float(np.square(samples, dtype=np.float64).mean())
        below = -10 * math.log10(max(power, 1e-30))
        return (
            under("min_s", seconds, self.min_s)
            or over("max_s", seconds, self.max_s)
            or over("silence_db", below, self.silence_db)
            or over("max_clipped", float((np.abs(samples) >= _FULL).mean()), self.max_clipped)
        )


RULE = Sound
