"""Multimodal processor: token counts for the text, arrays for the vision and audio encoders."""

import math
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
from ms_data.media.audio import audio_tokens, decode_audio, spectrogram, spectrogram_frames
from ms_data.media.images import (
    decode_image,
    image_patches,
    patch_grid,
    video_grid,
    video_patches,
)
from ms_data.media.parts import NOUNS, EncodedFile, MediaKind
from ms_data.media.settings import (
    AudioSettings,
    ImageSettings,
    MediaSettings,
    VideoSettings,
    read_settings,
)
from ms_data.media.video import Video, VideoLimits, decode_video


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """An image, audio clip or video that was decoded and checked once."""

    kind: MediaKind
    content: bytes
    """The encoded file."""
    tokens: int
    """Number of tokens in the text."""
    grid: tuple[int, int, int]
    """Patches in time, height and width; for audio, (1, 1, spectrogram frames)."""


@frozen
class Processor:
    """Converts images, video and audio to model inputs, like transformers' processors.

    Supports Qwen2-VL, Qwen2.5-VL and Qwen3-VL for PNG and JPEG images, Qwen2-VL and Qwen2.5-VL for
    MP4 and WebM video, and Qwen2-Audio (Whisper) for WAV and FLAC audio.
    """

    settings: MediaSettings
    folder: Path | None = None
    """Base folder of paths in messages. None: the corpus folder, or the folder of its only file."""

    @classmethod
    def load(cls, path: str | Path, *, media_folder: str | Path | None = None) -> "Processor":
        """Load a processor's settings.

        Args:
            path: model folder with processor_config.json or preprocessor_config.json.
            media_folder: base folder of media paths in messages. None: the corpus folder,
                or the folder of its only file.

        Raises:
            TokenizerError: the processor is missing or not supported.
            SettingError: `media_folder` is not a folder.
        """
        check_path("a processor", path, error=TokenizerError)
        check_path("media_folder", media_folder, error=SettingError, optional=True)
        if media_folder is not None and not os.path.isdir(media_folder):
            raise SettingError(f"media_folder must be a folder, got {str(media_folder)!r}")
        return cls(read_settings(Path(path)), None if media_folder is None else Path(media_folder))

    @property
    def digest(self) -> str:
        """xxh3-128 of all settings, hexadecimal."""
        return xxhash.xxh3_128_hexdigest(self.settings.encode())

    @property
    def tokens(self) -> dict[MediaKind, str]:
        """Placeholder token of every supported media kind."""
        tokens: dict[MediaKind, str] = {}
        if self.settings.pictures:
            tokens["image"] = self.settings.pictures.token
        if self.settings.sound:
            tokens["audio"] = self.settings.sound.token
        if self.settings.videos:
            tokens["video"] = self.settings.videos.token
        return tokens

    def measure(self, file: EncodedFile) -> MediaItem:
        """Decode a file completely, and determine its number of tokens.

        Raises:
            ValueError: the file is broken, too large, or not supported by the model.
        """
        try:
            if file.kind == "image":
                settings = self._image_settings()
                width, height = decode_image(file.content).size
                # Only sizes are needed here; patches are computed when a batch is read.
                grid = patch_grid(width, height, settings)
                return MediaItem("image", file.content, grid.tokens(settings), grid)
            if file.kind == "video":
                video_settings = self._video_settings()
                count, height, width, _ = _decode(file.content, video_settings).frames.shape
                grid = video_grid(count, width, height, video_settings)
                return MediaItem("video", file.content, grid.tokens(video_settings), grid)
            audio_settings = self._audio_settings()
            samples, rate_hz = decode_audio(file.content)
            frames = spectrogram_frames(len(samples), rate_hz, audio_settings)
            return MediaItem("audio", file.content, audio_tokens(frames), (1, 1, frames))
        except SettingError:
            raise
        except ValueError as error:
            raise ValueError(f"{file.location}: {error}") from error

    def patches(self, items: Sequence[MediaItem]) -> NDArray[np.float32]:
        """Return the concatenated patches of images, shape (patches, values per patch).

        Raises:
            ValueError: an image changed since it was measured.
        """
        settings = self._image_settings()
        parts = [np.empty((0, settings.width), np.float32)]  # also for a batch without images
        for item in items:
            parts.append(image_patches(decode_image(item.content), settings))
            if len(parts[-1]) != item.grid[0] * item.grid[1] * item.grid[2]:
                raise ValueError(f"{len(parts[-1])} patches do not match the grid {item.grid}")
        return np.concatenate(parts)

    def videos(self, items: Sequence[MediaItem]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return the patches of videos.

        Returns:
            Concatenated patches, shape (patches, values per patch), and the seconds between two
            temporal patches of each video, shape (videos,).

        Raises:
            ValueError: a video changed since it was measured.
        """
        settings = self._video_settings()
        parts = [np.empty((0, settings.width), np.float32)]
        intervals = np.zeros(len(items))
        for index, item in enumerate(items):
            video = _decode(item.content, settings)
            parts.append(video_patches(video.frames, settings))
            if len(parts[-1]) != item.grid[0] * item.grid[1] * item.grid[2]:
                raise ValueError(f"{len(parts[-1])} patches do not match the grid {item.grid}")
            intervals[index] = settings.temporal_patch_size * _frame_interval_s(video, settings)
        return np.concatenate(parts), intervals

    def spectrograms(
        self, items: Sequence[MediaItem]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the spectrograms of audio clips.

        Returns:
            Features of shape (clips, mels, frames), and a mask of shape (clips, frames), 1 for
            audio.

        Raises:
            ValueError: a clip changed since it was measured.
        """
        settings = self._audio_settings()
        features = np.zeros((len(items), settings.mels, settings.frames), np.float32)  # padded
        mask = np.zeros((len(items), settings.frames), np.int64)
        for index, item in enumerate(items):
            samples, rate_hz = decode_audio(item.content)
            frames = spectrogram_frames(len(samples), rate_hz, settings)
            if frames != item.grid[2]:
                raise ValueError(f"{frames} frames, but {item.grid[2]} were measured")
            features[index], mask[index, :frames] = spectrogram(samples, settings), 1
        return features, mask

    def _image_settings(self) -> ImageSettings:
        if self.settings.pictures is None:
            raise _unsupported("image")
        return self.settings.pictures

    def _video_settings(self) -> VideoSettings:
        if self.settings.videos is None:
            raise _unsupported("video")
        return self.settings.videos

    def _audio_settings(self) -> AudioSettings:
        if self.settings.sound is None:
            raise _unsupported("audio")
        return self.settings.sound


def _unsupported(kind: MediaKind) -> ValueError:
    return ValueError(f"{NOUNS[kind]}, which this processor does not support; remove it")


def _decode(content: bytes, settings: VideoSettings) -> Video:
    limits = VideoLimits(frames=settings.max_frames)
    return decode_video(content, frames_per_s=settings.frames_per_s, limits=limits)


def _frame_interval_s(video: Video, settings: VideoSettings) -> float:
    """Return the seconds between sampled frames: the nominal ones, or more for a slow video."""
    last = len(video.times_s) - 1
    if last < 1 or math.floor(video.times_s[-1] * settings.frames_per_s + 1e-6) <= last:
        return 1 / settings.frames_per_s
    return float(video.times_s[-1] / last)
