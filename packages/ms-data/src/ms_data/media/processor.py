"""The processor of a model that sees or hears: tokens for its text, arrays for its encoders."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from attrs import frozen
from numpy.typing import NDArray

from ms_data.errors import SettingError, TokenizerError
from ms_data.files.untrusted import check_path
from ms_data.media.parts import EncodedFile, MediaKind
from ms_data.media.pictures import decode_picture, grid_of, patches_of
from ms_data.media.settings import (
    MediaSettings,
    PictureSettings,
    SoundSettings,
    read_settings,
)
from ms_data.media.sound import decode_sound, frames_of, sound_tokens, spectrogram


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """A picture or a sound that was decoded once, and is whole."""

    kind: MediaKind
    content: bytes
    """As it was encoded."""
    tokens: int
    """Tokens that stand for it."""
    grid: tuple[int, int, int]
    """Patches in time, down and across; of a sound, (1, 1, frames of its spectrogram)."""


@frozen
class Processor:
    """Turns pictures and sounds into what a model reads, as transformers' processor does.

    Qwen2-VL, Qwen2.5-VL and Qwen3-VL for pictures of PNG and JPEG, Qwen2-Audio (Whisper) for
    sound of WAV and FLAC.
    """

    settings: MediaSettings
    folder: Path | None = None
    """Paths in messages are relative to it; None is the corpus, if it is one folder or file."""

    @classmethod
    def load(cls, path: str | Path, *, media_folder: str | Path | None = None) -> "Processor":
        """Read a processor's settings.

        Args:
            path: a model's folder, with processor_config.json or preprocessor_config.json.
            media_folder: paths of pictures and sounds in messages are relative to it; None is the
                corpus, if it is one folder, or the folder of its one file.

        Raises:
            TokenizerError: there is no processor, or none that is known.
            SettingError: `media_folder` is no folder.
        """
        check_path("a processor", path, error=TokenizerError)
        check_path("media_folder", media_folder, error=SettingError, optional=True)
        if media_folder is not None and not os.path.isdir(media_folder):
            raise SettingError(f"media_folder is {str(media_folder)!r}, no folder; give one")
        return cls(read_settings(Path(path)), None if media_folder is None else Path(media_folder))

    @property
    def digest(self) -> str:
        """Hexadecimal xxh3-128 of all settings."""
        return xxhash.xxh3_128_hexdigest(self.settings.encode())

    @property
    def tokens(self) -> dict[MediaKind, str]:
        """The token that stands for each kind that is read, by its name."""
        found: dict[MediaKind, str] = {}
        if self.settings.pictures:
            found["image"] = self.settings.pictures.token
        if self.settings.sound:
            found["audio"] = self.settings.sound.token
        return found

    def measure(self, file: EncodedFile) -> MediaItem:
        """Decode a file as a whole, and find how many tokens stand for it.

        Raises:
            ValueError: it is broken, too large, or nothing that the model reads.
        """
        try:
            if file.kind == "image":
                pictures = self._pictures()
                width, height = decode_picture(file.content).size
                grid = grid_of(width, height, pictures)
                return MediaItem("image", file.content, grid.tokens(pictures), grid)
            sound = self._sound()
            samples, rate_hz = decode_sound(file.content)
            frames = frames_of(len(samples), rate_hz, sound)
            return MediaItem("audio", file.content, sound_tokens(frames), (1, 1, frames))
        except SettingError:
            raise
        except ValueError as error:
            raise ValueError(f"{file.place}: {error}") from error

    def patches(self, items: Sequence[MediaItem]) -> NDArray[np.float32]:
        """Make the patches of pictures, one after the other, shape (patches, numbers a patch).

        Raises:
            ValueError: one is not what it was when it was measured.
        """
        settings = self._pictures()
        found = [np.empty((0, settings.width), np.float32)]
        for item in items:
            found.append(patches_of(decode_picture(item.content), settings))
            if len(found[-1]) != item.grid[0] * item.grid[1] * item.grid[2]:
                raise ValueError(f"{len(found[-1])} patches where the grid is {item.grid}")
        return np.concatenate(found)

    def spectrograms(
        self, items: Sequence[MediaItem]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Make the spectrograms of sounds.

        Returns:
            Shape (sounds, mels, frames), and a mask (sounds, frames), 1 where there is sound.

        Raises:
            ValueError: one is not what it was when it was measured.
        """
        settings = self._sound()
        features = np.zeros((len(items), settings.mels, settings.frames), np.float32)
        mask = np.zeros((len(items), settings.frames), np.int64)
        for at, item in enumerate(items):
            samples, rate_hz = decode_sound(item.content)
            frames = frames_of(len(samples), rate_hz, settings)
            if frames != item.grid[2]:
                raise ValueError(f"{frames} frames where there were {item.grid[2]}")
            features[at], mask[at, :frames] = spectrogram(samples, settings), 1
        return features, mask

    def _pictures(self) -> PictureSettings:
        if self.settings.pictures is None:
            raise ValueError("a picture, which this processor does not read; leave it out")
        return self.settings.pictures

    def _sound(self) -> SoundSettings:
        if self.settings.sound is None:
            raise ValueError("a sound, which this processor does not read; leave it out")
        return self.settings.sound
