"""Identity of a training: the settings its steps depend on, by name."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict
from torch import Tensor, nn

from ms_compress.errors import ConfigError
from ms_compress.quantization.layers import prepared_layers

DIGEST = "blake2b:"
"""Prefix of digests, which replace values too large to be shown."""
MODEL_SUFFIXES = (".json", ".safetensors", ".bin")
"""Suffixes of the files that define a model."""


def identity_of(
    model: nn.Module, tokens: Mapping[str, Tensor], options: Any, extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings that the steps of a training depend on.

    Args:
        model: the prepared model.
        tokens: the text, by tensor name.
        options: training settings, an attrs instance.
        extra: additional settings.
    """
    shapes = [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    schemes = [(name, layer.scheme, layer.activations) for name, layer in prepared_layers(model)]
    text = [value.cpu().contiguous().numpy().tobytes() for value in tokens.values()]
    settings = {f"tuning.{name}": repr(value) for name, value in asdict(options).items()}
    layers = digest_of(repr((shapes, schemes)).encode())
    return {**extra, **settings, "layers": layers, "tokens": digest_of(*text)}


def digest_of(*contents: bytes) -> str:
    """Return a digest of contents that are too large to be shown."""
    digest = hashlib.blake2b(digest_size=16)
    for content in contents:
        # The lengths separate the contents: ("ab", "c") and ("a", "bc") differ.
        digest.update(len(content).to_bytes(8, "little") + content)
    return DIGEST + digest.hexdigest()


def digest_of_path(path: Path) -> str:
    """Return a digest of a file, dataset index or model folder; empty if it does not exist."""
    index = path / "index.json"
    if path.is_file() or index.is_file():
        with (path if path.is_file() else index).open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return DIGEST + digest.hexdigest()
    if not path.is_dir():
        return ""
    files = [
        file for file in sorted(path.iterdir()) if file.suffix in MODEL_SUFFIXES and file.is_file()
    ]
    return digest_of(*(f"{file.name} {digest_of_path(file)}".encode() for file in files))


def is_digest(*values: object) -> bool:
    """Return whether any of the values is a digest, which is meaningless to users."""
    return any(isinstance(value, str) and value.startswith(DIGEST) for value in values)


def describe_change(name: str, previous: object, current: object) -> str:
    """Describe how a setting changed, with both values unless they are digests."""
    if is_digest(previous, current):
        return f"{name} changed"
    return f"{name} is {current or 'not given'}, was {previous or 'not given'}"


def check_identity(path: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Check that stored work comes from a run with the same settings.

    Raises:
        ConfigError: the settings differ; the message names the differences.
    """
    changed = [name for name in {**current, **saved} if saved.get(name) != current.get(name)]
    if changed:
        changes = [describe_change(name, saved.get(name), current.get(name)) for name in changed]
        raise ConfigError(
            f"{path} belongs to a run with other settings: {', '.join(changes)}; use the same"
            " settings, or remove it to restart"
        )
