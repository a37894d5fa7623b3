"""Images, audio, and model folders with a vision or audio processor, shared by several tests."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from PIL import Image

from .chat_templates import tokenizer_json

VISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'audio' in part %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Marks images and audio as the templates of Qwen2-VL and Qwen2-Audio do."""

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
AUDIO_TOKENS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")

QWEN2 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 224 * 224,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""Qwen2-VL's published format, with smaller images."""

QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Qwen3-VL's published format, with smaller images."""

WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "chunk_length": 2,
    "n_fft": 400,
    "hop_length": 160,
    "sampling_rate": 16_000,
}
"""Qwen2-Audio's published format, with shorter clips."""


def write_model(folder: Path, config: dict[str, Any], template: str = VISION_TEMPLATE) -> Path:
    """Write a model folder: tokenizer, chat template and processor settings."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tokenizers.Tokenizer.from_str(tokenizer_json().decode())
    model.add_special_tokens([*IMAGE_TOKENS, *AUDIO_TOKENS])
    (folder / "tokenizer.json").write_text(model.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return folder


def random_image(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return an image of waves and noise, shape (height, width, 3)."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    waves = [np.sin(x / (3 + seed % 5)), np.cos(y / 7), np.sin((x + y) / 11)]
    noise = rng.normal(0, 20, (height, width, 3))
    return np.clip(127 + 90 * np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)


def encode_image(pixels: NDArray[np.uint8], file_format: str = "PNG", **settings: Any) -> bytes:
    """Encode an image as a file in memory."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, file_format, **settings)
    return buffer.getvalue()


def random_audio(samples: int, seed: int = 0) -> NDArray[np.int16]:
    """Return audio of tones and noise at 16 kHz."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(samples) / 16_000
    tones = np.sin(2 * np.pi * 220 * (1 + seed % 3) * time_s) + 0.3 * np.sin(
        2 * np.pi * 3000 * time_s
    )
    return (6000 * tones + rng.normal(0, 200, samples)).astype(np.int16)


def encode_audio(
    samples: NDArray[np.int16], file_format: str = "WAV", rate_hz: int = 16_000
) -> bytes:
    """Encode audio as a file in memory."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format=file_format)
    return buffer.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """Return a PNG whose header claims the given size but which holds almost no data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 64))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def media_row(parts: list[dict[str, Any]], answer: str = "A picture of waves.") -> dict[str, Any]:
    """Return a conversation row whose user message holds these parts."""
    return {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
    }
