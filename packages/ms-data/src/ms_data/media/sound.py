"""Decodes sound, and makes the spectrogram that Whisper and Qwen2-Audio read.

Equal to transformers' `WhisperFeatureExtractor` up to what 32 and 64 bit differ by, 1e-5: mean of
the channels, filled up with silence, windows of Hann, power, Slaney's mel filters, logarithm, all
that is 80 dB below the loudest raised to it.
"""

import functools
import io
import struct
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ms_data.errors import SettingError
from ms_data.media.settings import SOUND_SAMPLES, SoundSettings

FORMATS = ("WAV", "FLAC")
_MPEG = (b"\x50\x00", b"\x55\x00")
"""Tags of MPEG's layers in the head of a WAV file; its decoder prints what it stumbles over."""
_CHUNK = struct.Struct("<4sI")
_FLOOR = 1e-10
_LINEAR_MELS, _LINEAR_HZ, _MELS_AN_OCTAVE = 15.0, 1000.0, 27.0 / np.log(6.4)
_TOP_HZ = 8000.0


def decode_sound(content: bytes) -> tuple[NDArray[np.float32], int]:
    """Decode a whole sound of WAV or FLAC.

    Returns:
        Samples, shape (n,), the mean of all channels, and how many there are a second.

    Raises:
        ValueError: it is neither, is broken or cut off, or has more samples than
            `SOUND_SAMPLES`, which its head says before memory is taken.
        SettingError: soundfile is not installed.
    """
    library = _library()
    _check_wav(content)
    try:
        with library.SoundFile(io.BytesIO(content)) as file:
            if file.format not in FORMATS:
                raise ValueError(f"{file.format} is not read; convert it to WAV or FLAC")
            frames, channels = file.frames, file.channels
            if frames * channels > SOUND_SAMPLES:
                raise ValueError(f"{frames} samples of {channels} channels are more than are read")
            samples = file.read(frames, dtype="float32", always_2d=True)
            rate: int = file.samplerate
    except library.LibsndfileError as error:
        raise ValueError(f"no sound of WAV or FLAC, or a broken one: {error}") from error
    except MemoryError as error:
        raise ValueError("a sound that asks for more memory than there is") from error
    if len(samples) != frames or not frames:
        raise ValueError(f"a sound of {len(samples)} samples, whose head says {frames}")
    if not np.isfinite(samples).all():
        raise ValueError("a sound with samples that are no numbers")
    return samples.mean(axis=1, dtype=np.float32), rate


def sound_tokens(frames: int) -> int:
    """Count the tokens of a spectrogram's frames, which Qwen2-Audio's two convolutions halve."""
    return (((frames - 1) // 2 + 1) - 2) // 2 + 1


def frames_of(samples: int, rate_hz: int, settings: SoundSettings) -> int:
    """Count the frames of a spectrogram that are no silence at its end.

    Raises:
        ValueError: the sound has another rate, or is too long or too short for the model.
    """
    if rate_hz != settings.rate_hz:
        raise ValueError(
            f"{rate_hz} samples a second where the model hears {settings.rate_hz}; resample it"
        )
    if samples > settings.samples:
        raise ValueError(
            f"{samples / rate_hz:.1f} s, more than the {settings.chunk_s} s that the model hears; "
            "cut it in parts"
        )
    frames = -(-samples // settings.hop_samples)
    if sound_tokens(frames) < 1:
        raise ValueError(f"{samples} samples are too short for one token; leave it out")
    return frames


def spectrogram(samples: NDArray[np.float32], settings: SoundSettings) -> NDArray[np.float32]:
    """Make the spectrogram of a sound, shape (mels, frames) of the whole chunk."""
    size, hop = settings.window_samples, settings.hop_samples
    filled = np.zeros(settings.samples, np.float32)
    filled[: len(samples)] = samples
    padded = np.pad(filled, size // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop][: settings.frames]
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(size) / size)
    power = np.abs(np.fft.rfft(windows * hann)) ** 2  # (frames, size // 2 + 1)
    mels = _filters(size, settings.mels, settings.rate_hz) @ power.T
    logs = np.log10(np.maximum(mels, _FLOOR))
    logs = np.maximum(logs, logs.max() - 8.0)
    found: NDArray[np.float32] = ((logs + 4.0) / 4.0).astype(np.float32)
    return found


@functools.lru_cache(maxsize=4)
def _filters(size: int, mels: int, rate_hz: int) -> NDArray[np.float64]:
    """Compute the triangles on Slaney's scale, each of one area; shape (mels, size // 2 + 1)."""
    top = _LINEAR_MELS + np.log(_TOP_HZ / _LINEAR_HZ) * _MELS_AN_OCTAVE
    places = np.linspace(0.0, top, mels + 2)
    linear = places * _LINEAR_HZ / _LINEAR_MELS
    bent = _LINEAR_HZ * np.exp((places - _LINEAR_MELS) / _MELS_AN_OCTAVE)
    corners = np.where(places < _LINEAR_MELS, linear, bent)
    bins = np.linspace(0, rate_hz // 2, size // 2 + 1)
    slopes = corners[:, None] - bins[None, :]
    steps = np.diff(corners)[:, None]
    triangles = np.minimum(-slopes[:-2] / steps[:-1], slopes[2:] / steps[1:])
    areas = 2.0 / (corners[2:] - corners[:-2])
    found: NDArray[np.float64] = np.maximum(0.0, triangles) * areas[:, None]
    return found


def _check_wav(content: bytes) -> None:
    """Check that each chunk of a RIFF file lies in it, as libsndfile reads what is there.

    Raises:
        ValueError: one says that it is longer than the file, or MPEG's decoder would be asked.
    """
    at, end = 12, len(content)
    while content[:4] == b"RIFF" and at + _CHUNK.size <= end:
        name, size = _CHUNK.unpack_from(content, at)
        if name == b"fmt " and content[at + _CHUNK.size : at + _CHUNK.size + 2] in _MPEG:
            raise ValueError("MPEG sound in a WAV file is not read; convert it to PCM")
        at += _CHUNK.size + size + size % 2
        if name == b"data":
            if at > end + size % 2:
                raise ValueError("a sound that is cut off, or whose head lies about its length")
            return


def check_soundfile() -> None:
    """Find out whether sound can be decoded.

    Raises:
        SettingError: soundfile is not installed.
    """
    _library()


def _library() -> Any:
    try:
        return import_module("soundfile")
    except (ImportError, OSError) as error:  # OSError: libsndfile itself is missing
        raise SettingError("soundfile is needed for sound; pip install 'ms-data[media]'") from error
