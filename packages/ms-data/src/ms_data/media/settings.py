"""Settings of a multimodal processor, from the files next to a tokenizer.

 file | content |
---|---|
 `processor_config.json` | `image_processor`, `video_processor` and `feature_extractor` |
 `preprocessor_config.json` | an image processor or feature extractor alone, in older folders |
 `video_preprocessor_config.json` | a video processor alone, in older folders |
 `config.json` | time scale of a vision-language model's video positions |
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ms_data.errors import TokenizerError, printable
from ms_data.files.untrusted import decode_json, read_json

IMAGE_PIXELS = 1 << 26
"""Maximum pixels of an image before and after resizing; 200 MB decoded."""

AUDIO_SAMPLES = 1 << 25
"""Maximum samples of an audio file; 35 minutes at 16 kHz."""

_IMAGE_CLASSES = tuple(f"Qwen2VLImageProcessor{end}" for end in ("", "Fast", "Pil"))
_VIDEO_CLASSES = ("Qwen2VLVideoProcessor", "Qwen2_5_VLVideoProcessor")
_VIDEO_FILE = "video_preprocessor_config.json"
MAX_FRAME_RATE = 240
"""Maximum frames per second of a video, which bounds the decoding time."""
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3  # PIL's number


class ImageSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pictures"
):
    """Settings of the image processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

    token: str
    """Placeholder token of an image, repeated for every merged patch."""
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    """Patches per side that are merged into one token."""
    min_pixels: int
    max_pixels: int
    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            _require(1 <= getattr(self, name) <= 256, name, getattr(self, name))
        _require(self.factor <= 1024, "patch_size x merge_size", self.factor)
        _require(0 < self.min_pixels <= self.max_pixels, "min_pixels", self.min_pixels)
        _require(self.max_pixels <= IMAGE_PIXELS, "max_pixels", self.max_pixels)
        # A token must fit.
        _require(self.factor**2 <= self.max_pixels, "max_pixels", self.max_pixels)
        _require(all(0 < value < 1e6 for value in self.std), "image_std", self.std)
        _require(all(abs(value) < 1e6 for value in self.mean), "image_mean", self.mean)
        _require(0 < self.rescale_factor < 1e6, "rescale_factor", self.rescale_factor)

    @property
    def factor(self) -> int:
        """Pixels per side of one token."""
        return self.patch_size * self.merge_size

    @property
    def width(self) -> int:
        """Values per patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2  # RGB


class VideoSettings(ImageSettings, frozen=True, kw_only=True, tag="videos"):
    """Settings of Qwen2-VL's and Qwen2.5-VL's video processor; bounds on pixels are per frame."""

    frames_per_s: float
    """Sampled frames per second."""
    max_frames: int
    """Maximum number of sampled frames; a longer video is rejected."""
    max_tokens: int | None
    """Context length of which a video's pixels may fill 90% (`cap_pixels_per_frame`); None: any."""
    positions_per_s: float | None
    """Time positions per second of video, for Qwen2.5-VL. None: one per temporal patch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 < self.frames_per_s <= MAX_FRAME_RATE, "fps", self.frames_per_s)
        _require(1 <= self.max_frames <= 1 << 16, "max_frames", self.max_frames)
        _require(self.max_tokens is None or self.max_tokens > 0, "max_tokens", self.max_tokens)
        scale = self.positions_per_s
        _require(scale is None or 0 < scale <= 1000, "tokens_per_second", scale)

    def per_frame(self, frames: int) -> ImageSettings:
        """Return the settings of one frame of a video with this number of frames."""
        if self.max_tokens is None:
            return self
        # qwen-vl-utils divides the pixels of the context among temporal patches.
        total = int(self.max_tokens * self.factor**2 * 0.9)
        share = total * self.temporal_patch_size // frames
        bound = max(min(self.max_pixels, share), int(self.min_pixels * 1.05))
        return msgspec.structs.replace(self, max_pixels=bound)


class AudioSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sound"
):
    """Settings of Whisper's feature extractor, as used by Qwen2-Audio."""

    token: str
    """Placeholder token of an audio clip, repeated for every output frame of the encoder."""
    mels: int
    rate_hz: int
    hop_samples: int
    window_samples: int
    chunk_s: int
    """Length in seconds to which clips are padded, and maximum length."""

    def __post_init__(self) -> None:
        _require(1 <= self.mels <= 1024, "feature_size", self.mels)
        _require(1000 <= self.rate_hz <= 384_000, "sampling_rate", self.rate_hz)
        _require(1 <= self.hop_samples <= 1 << 16, "hop_length", self.hop_samples)
        _require(2 <= self.window_samples <= 1 << 16, "n_fft", self.window_samples)
        _require(self.window_samples % 2 == 0, "n_fft", self.window_samples)
        _require(0 < self.chunk_s <= AUDIO_SAMPLES // self.rate_hz, "chunk_length", self.chunk_s)
        # Full frames.
        _require(self.samples % self.hop_samples == 0, "hop_length", self.hop_samples)
        _require(self.samples > self.window_samples, "chunk_length", self.chunk_s)

    @property
    def samples(self) -> int:
        """Samples of a padded clip."""
        return self.chunk_s * self.rate_hz

    @property
    def frames(self) -> int:
        """Frames of its spectrogram."""
        return self.samples // self.hop_samples


class MediaSettings(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ms-data.media.1"
):
    """Settings for images, video and audio."""

    pictures: ImageSettings | None = None
    sound: AudioSettings | None = None
    videos: VideoSettings | None = None

    def __post_init__(self) -> None:
        _require(bool(self.pictures or self.sound), "media", "neither images nor audio")

    def encode(self) -> bytes:
        """Encode the settings for the file next to the shards."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def decode(cls, content: bytes, where: Path) -> "MediaSettings":
        """Decode settings that `encode` wrote.

        Raises:
            TokenizerError: the content is invalid.
        """
        return decode_json(content, cls, where=where, error=TokenizerError)


def read_settings(folder: Path) -> MediaSettings:
    """Read the processor settings in a model folder.

    Raises:
        TokenizerError: the folder holds no processor, or not one for Qwen-VL or Qwen2-Audio.
    """
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = folder / name
        if not path.exists():
            continue
        config = read_json(path, dict[str, Any], error=TokenizerError)
        try:
            settings = _settings(config, folder)
        except (ValueError, TypeError) as error:  # from our checks, or from wrong value types
            raise TokenizerError(f"{printable(path)}: {printable(error)}; {_REMEDY}") from error
        if settings.pictures or settings.sound:
            return settings
    raise TokenizerError(
        f"{printable(folder)} holds no processor (processor_config.json or "
        f"preprocessor_config.json); {_REMEDY}"
    )


_REMEDY = "use the folder of a Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen2-Audio processor"


def _settings(config: Mapping[str, Any], folder: Path) -> MediaSettings:
    """Parse either form of the file."""
    # In older folders, the file is one of the two objects itself.
    picture = config.get("image_processor") or config
    sound = config.get("feature_extractor") or config
    settings: dict[str, Any] = {}
    if "image_processor_type" in picture:
        settings["pictures"] = _image_settings(picture, config.get("image_token", "<|image_pad|>"))
        # Older folders have one file for images and video.
        video = config.get("video_processor") or _other_file(folder, _VIDEO_FILE) or picture
        settings["videos"] = _video_settings(
            video,
            config.get("video_token", "<|video_pad|>"),
            _other_file(folder, "config.json"),
            config.get("processor_class", "Qwen2VLProcessor"),
        )
    if "feature_extractor_type" in sound:
        settings["sound"] = _audio_settings(sound, config.get("audio_token", "<|AUDIO|>"))
    if not settings:
        raise ValueError("there is neither an image processor nor a feature extractor")
    return MediaSettings(**settings)


def _image_settings(config: Mapping[str, Any], token: str) -> ImageSettings:
    class_name = config["image_processor_type"]
    if class_name not in _IMAGE_CLASSES:
        raise ValueError(f"the image processor {class_name!r} is not for Qwen-VL")
    values = _patch_settings(config, token, 56 * 56, 28 * 28 * 1280)
    return msgspec.convert({"type": "pictures", **values}, ImageSettings)


def _video_settings(
    config: Mapping[str, Any], token: str, model: Mapping[str, Any], processor: str
) -> VideoSettings | None:
    """Parse a video processor; None if it is of a model whose video is not supported.

    Args:
        config: settings of the video processor, or of the image processor of older folders.
        token: placeholder token.
        model: content of config.json; empty without one.
        processor: class of the processor.
    """
    class_name = config.get("video_processor_type", "Qwen2VLVideoProcessor")
    model_type = model.get("model_type", "qwen2_vl")
    # Qwen3-VL writes time stamps between the frames of a video. The positions of Qwen2.5-VL depend
    # on its config.json.
    if class_name not in _VIDEO_CLASSES or model_type not in ("qwen2_vl", "qwen2_5_vl"):
        return None
    if not model and processor != "Qwen2VLProcessor":
        return None
    vision = model.get("vision_config") or {}
    capped = config.get("cap_pixels_per_frame")
    scaled = model_type == "qwen2_5_vl"
    values = {
        **_patch_settings(config, token, 128 * 28 * 28, 768 * 28 * 28),
        "frames_per_s": config.get("fps") or 2.0,
        "max_frames": config.get("max_frames") or 768,
        "max_tokens": config.get("max_video_tokens", 128_000) if capped else None,
        # transformers' default
        "positions_per_s": vision.get("tokens_per_second", 4) if scaled else None,
    }
    return msgspec.convert({"type": "videos", **values}, VideoSettings)


def _other_file(folder: Path, name: str) -> dict[str, Any]:
    """Read another file of a model folder; empty if there is none."""
    path = folder / name
    return read_json(path, dict[str, Any], error=TokenizerError) if path.exists() else {}


def _patch_settings(
    config: Mapping[str, Any], token: str, min_pixels: int, max_pixels: int
) -> dict[str, Any]:
    """Parse what image and video processors have in common; the bounds are the default."""
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not config.get(name, True):
            raise ValueError(f"{name}=false is not supported")
    if config.get("resample", _BICUBIC) != _BICUBIC:
        raise ValueError(f"resample must be 3 (bicubic), got {config['resample']!r}")
    size = config.get("size") or {}
    return {
        "token": token,
        "patch_size": config.get("patch_size", 14),
        "temporal_patch_size": config.get("temporal_patch_size", 2),
        "merge_size": config.get("merge_size", 2),
        # The "edges" of `size` are pixel counts as well, under transformers' common names.
        "min_pixels": config.get("min_pixels") or size.get("shortest_edge", min_pixels),
        "max_pixels": config.get("max_pixels") or size.get("longest_edge", max_pixels),
        "rescale_factor": config.get("rescale_factor", 1 / 255),
        "mean": config.get("image_mean", _CLIP_MEAN),
        "std": config.get("image_std", _CLIP_STD),
    }


def _audio_settings(config: Mapping[str, Any], token: str) -> AudioSettings:
    class_name = config["feature_extractor_type"]
    if class_name != "WhisperFeatureExtractor":
        raise ValueError(f"the feature extractor {class_name!r} is not Whisper's")
    if config.get("dither") or config.get("padding_value"):
        raise ValueError("dither and a padding_value other than 0 are not supported")
    values = {
        "token": token,
        "mels": config.get("feature_size", 80),
        "rate_hz": config.get("sampling_rate", 16_000),
        "hop_samples": config.get("hop_length", 160),
        "window_samples": config.get("n_fft", 400),
        "chunk_s": config.get("chunk_length", 30),
    }
    return msgspec.convert({"type": "sound", **values}, AudioSettings)


def _require(condition: bool, name: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} cannot be {value!r}")
