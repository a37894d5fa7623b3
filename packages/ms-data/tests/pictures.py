"""Pictures, sounds, and folders of models that see or hear, as several tests read them."""

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

from .chats import tokenizer_json

SEEING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'audio' in part %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Marks pictures and sounds as the templates of Qwen2-VL and Qwen2-Audio do."""

PLACES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
HEARD = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")

QWEN2 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 224 * 224,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""In the form in which Qwen2-VL was published, with smaller pictures."""

QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Likewise Qwen3-VL."""

WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "chunk_length": 2,
    "n_fft": 400,
    "hop_length": 160,
    "sampling_rate": 16_000,
}
"""Likewise Qwen2-Audio, with shorter sounds."""


def write_model(folder: Path, config: dict[str, Any], template: str = SEEING) -> Path:
    """A model's folder: tokenizer, template, and the settings of its processor."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tokenizers.Tokenizer.from_str(tokenizer_json().decode())
    model.add_special_tokens([*PLACES, *HEARD])
    (folder / "tokenizer.json").write_text(model.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return folder


def drawn(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """A picture of shapes and noise, shape (height, width, 3)."""
    rng = np.random.default_rng(seed)
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    waves = [np.sin(across / (3 + seed % 5)), np.cos(down / 7), np.sin((across + down) / 11)]
    noise = rng.normal(0, 20, (height, width, 3))
    return np.clip(127 + 90 * np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)


def encoded(pixels: NDArray[np.uint8], form: str = "PNG", **settings: Any) -> bytes:
    """Its file."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **settings)
    return out.getvalue()


def hummed(samples: int, seed: int = 0) -> NDArray[np.int16]:
    """A sound of tones and noise."""
    rng = np.random.default_rng(seed)
    at = np.arange(samples) / 16_000
    tones = np.sin(2 * np.pi * 220 * (1 + seed % 3) * at) + 0.3 * np.sin(2 * np.pi * 3000 * at)
    return (6000 * tones + rng.normal(0, 200, samples)).astype(np.int16)


def recorded(samples: NDArray[np.int16], form: str = "WAV", rate_hz: int = 16_000) -> bytes:
    """Its file."""
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, samples, rate_hz, format=form)
    return out.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG whose head says so many pixels, and which holds none."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 64))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def asked(parts: list[dict[str, Any]], answer: str = "A picture of waves.") -> dict[str, Any]:
    """A row whose user shows these parts."""
    return {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": answer},
        ]
    }
