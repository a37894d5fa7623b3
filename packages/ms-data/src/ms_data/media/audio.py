"""Decodes audio, and computes the spectrogram of Whisper and Qwen2-Audio.

Equal to transformers' `WhisperFeatureExtractor` up to the difference of 32 and 64 bits (1e-5):
average the channels, pad with silence, apply Hann windows, compute power and Slaney's mel filters,
take the logarithm, and clamp to 80 dB below the maximum.
"""

import functools
import io
import struct
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_data.errors import SettingError
from ms_data.media.settings import AUDIO_SAMPLES, AudioSettings

FORMATS = ("WAV", "FLAC")
_MPEG = (b"\x50\x00", b"\x55\x00")
"""MPEG format tags in a WAV header; libsndfile's MPEG decoder prints warnings to stderr."""
_CHUNK = struct.Struct("<4sI")
_FLOOR = 1e-10
_LINEAR_MELS, _LINEAR_HZ, _MELS_PER_OCTAVE = 15.0, 1000.0, 27.0 / np.log(6.4)
_TOP_HZ = 8000.0


def decode_audio(content: bytes) -> tuple[NDArray[np.float32], int]:
    """Decode a WAV or FLAC file.

    Returns:
        Samples averaged over the channels, shape (n,), and the sampling rate in Hz.

    Raises:
        ValueError: the content has another format, is broken or truncated, or its header declares
            more than `AUDIO_SAMPLES` samples.
        SettingError: soundfile is not installed.
    """
    library = _library()
    _check_wav(content)
    try:
        with library.SoundFile(io.BytesIO(content)) as file:
            if file.format not in FORMATS:
                raise ValueError(f"{file.format} is not supported; convert it to WAV or FLAC")
            frames, channels = file.frames, file.channels
            if frames * channels > AUDIO_SAMPLES:
                raise ValueError(
                    f"{frames} samples of {channels} channels exceed the limit of {AUDIO_SAMPLES}"
                )
            samples = file.read(frames, dtype="float32", always_2d=True)
            rate: int = file.samplerate
    except library.LibsndfileError as error:
        raise ValueError(f"not a WAV or FLAC file, or a broken one: {error}") from error
    except MemoryError as error:
        raise ValueError("audio that needs more memory than available") from error
    if len(samples) != frames or not frames:
        raise ValueError(f"audio of {len(samples)} samples, but the header declares {frames}")
    if not np.isfinite(samples).all():
        raise ValueError("audio with samples that are not finite")
    return samples.mean(axis=1, dtype=np.float32), rate


def audio_tokens(frames: int) -> int:
    """Return the number of tokens for spectrogram frames; Qwen2-Audio halves them twice."""
    return (((frames - 1) // 2 + 1) - 2) // 2 + 1


def spectrogram_frames(samples: int, rate_hz: int, settings: AudioSettings) -> int:
    """Return the number of spectrogram frames without the padding.

    Raises:
        ValueError: the sampling rate is wrong, or the clip is too long or too short for the model.
    """
    if rate_hz != settings.rate_hz:
        raise ValueError(
            f"the sampling rate must be {settings.rate_hz} Hz, got {rate_hz}; resample it"
        )
    if samples > settings.samples:
        raise ValueError(
            f"{samples / rate_hz:.1f} s of audio, but the model accepts at most {settings.chunk_s} "
            "s; split it"
        )
    frames = -(-samples // settings.hop_samples)
    if audio_tokens(frames) < 1:
        raise ValueError(f"{samples} samples are too short for one token; remove it")
    return frames


def spectrogram(samples: NDArray[np.float32], settings: AudioSettings) -> NDArray[np.float32]:
    """Compute the spectrogram of a clip, shape (mels, frames), over the padded length."""
    size, hop = settings.window_samples, settings.hop_samples
    chunk = np.zeros(settings.samples, np.float32)
    chunk[: len(samples)] = samples
    padded = np.pad(chunk, size // 2, mode="reflect")
    # (frames, size)
    windows = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop][: settings.frames]
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(size) / size)
    power = np.abs(np.fft.rfft(windows * hann)) ** 2  # (frames, size // 2 + 1)
    mels = _filters(size, settings.mels, settings.rate_hz) @ power.T
    logs = np.log10(np.maximum(mels, _FLOOR))
    logs = np.maximum(logs, logs.max() - 8.0)  # 80 dB below the maximum
    result: NDArray[np.float32] = ((logs + 4.0) / 4.0).astype(np.float32)
    return result


@functools.lru_cache(maxsize=4)
def _filters(size: int, mels: int, rate_hz: int) -> NDArray[np.float64]:
    """Compute triangular filters of unit area on Slaney's mel scale: (mels, size // 2 + 1)."""
    top = _LINEAR_MELS + np.log(_TOP_HZ / _LINEAR_HZ) * _MELS_PER_OCTAVE
    mel_points = np.linspace(0.0, top, mels + 2)
    linear = mel_points * _LINEAR_HZ / _LINEAR_MELS
    logarithmic = _LINEAR_HZ * np.exp((mel_points - _LINEAR_MELS) / _MELS_PER_OCTAVE)
    corners = np.where(mel_points < _LINEAR_MELS, linear, logarithmic)
    bins = np.linspace(0, rate_hz // 2, size // 2 + 1)
    slopes = corners[:, None] - bins[None, :]
    steps = np.diff(corners)[:, None]
    # (mels, size // 2 + 1)
    triangles = np.minimum(-slopes[:-2] / steps[:-1], slopes[2:] / steps[1:])
    areas = 2.0 / (corners[2:] - corners[:-2])
    filters: NDArray[np.float64] = np.maximum(0.0, triangles) * areas[:, None]
    return filters


def _check_wav(content: bytes) -> None:
    """Check that the chunks of a RIFF file are complete; libsndfile reads truncated ones silently.

    Raises:
        ValueError: a chunk is longer than the file, or the format is MPEG.
    """
    offset, end = 12, len(content)
    while content[:4] == b"RIFF" and offset + _CHUNK.size <= end:
        name, size = _CHUNK.unpack_from(content, offset)
        if name == b"fmt " and content[offset + _CHUNK.size : offset + _CHUNK.size + 2] in _MPEG:
            raise ValueError("MPEG audio in a WAV file is not supported; convert it to PCM")
        offset += _CHUNK.size + size + size % 2
        if name == b"data":
            if offset > end + size % 2:
                raise ValueError("audio that is truncated, or whose header has a wrong length")
            return


def check_soundfile() -> None:
    """Check that audio can be decoded.

    Raises:
        SettingError: soundfile is not installed.
    """
    _library()


def _library() -> Any:
    try:
        return import_module("soundfile")
    except (ImportError, OSError) as error:  # OSError: libsndfile itself is missing
        raise SettingError("audio needs soundfile; pip install 'ms-data[media]'") from error
