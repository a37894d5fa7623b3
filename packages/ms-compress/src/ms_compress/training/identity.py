"""What the steps of a training follow from, by name: a run with another identity is another run."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict
from torch import Tensor, nn

from ms_compress.quantisation.layers import prepared_layers

DIGEST = "blake2b:"
"""Begins a value that stands for something too large to be shown."""
CONTENTS = (".json", ".safetensors", ".bin")
"""Files of a folder that its model follows from."""


def identity_of(
    model: nn.Module, tokens: Mapping[str, Tensor], options: Any, more: Mapping[str, str]
) -> dict[str, str]:
    """Name what the steps of a training follow from.

    Args:
        model: as it is prepared.
        tokens: the text, by the tensors' names.
        options: the settings, an attrs value.
        more: what the caller adds.
    """
    shapes = [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    schemes = [(name, layer.scheme, layer.activations) for name, layer in prepared_layers(model)]
    text = [value.cpu().contiguous().numpy().tobytes() for value in tokens.values()]
    settings = {f"tuning.{name}": repr(value) for name, value in asdict(options).items()}
    layers = digest_of(repr((shapes, schemes)).encode())
    return {**more, **settings, "layers": layers, "tokens": digest_of(*text)}


def digest_of(*contents: bytes) -> str:
    """Return what stands for contents that are too large to be shown."""
    whole = hashlib.blake2b(digest_size=16)
    for content in contents:
        whole.update(len(content).to_bytes(8, "little") + content)
    return DIGEST + whole.hexdigest()


def digest_of_path(path: Path) -> str:
    """Return a digest of a file, a dataset's index or a model's folder; empty if it is none."""
    index = path / "index.json"
    if path.is_file() or index.is_file():
        with (path if path.is_file() else index).open("rb") as file:
            whole = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return DIGEST + whole.hexdigest()
    if not path.is_dir():
        return ""
    files = [each for each in sorted(path.iterdir()) if each.suffix in CONTENTS and each.is_file()]
    return digest_of(*(f"{each.name} {digest_of_path(each)}".encode() for each in files))


def is_digest(*values: object) -> bool:
    """Return whether one of the values is a digest, which says nothing to people."""
    return any(isinstance(value, str) and value.startswith(DIGEST) for value in values)


def describe_change(name: str, before: object, now: object) -> str:
    """Say in words how a setting changed; both are shown but where they are digests."""
    if is_digest(before, now):
        return f"{name} changed"
    return f"{name} is {now or 'not given'}, was {before or 'not given'}"
