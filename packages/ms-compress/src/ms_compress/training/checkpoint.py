"""Checkpoints of training (one sealed file) and calibration (one sealed file per decoder layer).

A killed run resumes from them exactly. They record the settings that its steps depend on, and a run
with other settings is rejected with the names of these settings. The digest of a sealed file is
checked before its content is used: line 1 is the BLAKE2b hash of everything after it, line 2 a JSON
header, and the rest the tensors.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import msgspec
import torch
from attrs import asdict, frozen
from torch import Tensor, nn

from ms_compress.errors import ConfigError, ExportError
from ms_compress.files.durable import replace, writing
from ms_compress.files.untrusted import open_file
from ms_compress.methods.pruning import masks, set_masks
from ms_compress.quantization.layers import prepared_layers

logger = logging.getLogger(__name__)

DIGEST_CHARACTERS = 128
CHUNK_BYTES = 2**20
HEADER_BYTES = 2**26
"""Maximum length of a header."""
DIGEST = "blake2b:"
"""Prefix of digests, which replace values too large to be shown."""
MODEL_SUFFIXES = (".json", ".safetensors", ".bin")
"""Suffixes of the files that define a model."""


class TrainingHeader(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-compress-training/3", tag_field="format"
):
    """Settings and progress of a saved training run."""

    identity: dict[str, str]
    """Settings by name; large values are replaced by digests."""
    losses: list[float]
    """Loss of each finished step."""


class TrainingCheckpoint:
    """Save and load the model, its masks, the optimizer and torch's random states.

    Args:
        path: path of the file; an existing file is replaced atomically.
        identity: settings that the steps depend on; a file with others is refused.
        every_s: seconds between writes.
    """

    def __init__(self, path: Path, identity: Mapping[str, str], *, every_s: float) -> None:
        self.path = path
        self._identity = dict(identity)
        self._every_s = every_s
        self._written = monotonic()

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """Restore model and optimizer; return the losses of the finished steps.

        Raises:
            ConfigError: the file belongs to another run, or is damaged.
        """
        if not self.path.is_file():
            return []
        with opened(self.path) as (line, payload):
            header = _header(self.path, line)
            # Before the state is loaded, which may not fit a model with other settings.
            check_identity(self.path, header.identity, self._identity)
            state = torch.load(payload, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        set_masks(model, state["masks"])
        _set_random_states(state["random"])
        return list(header.losses)

    def is_due(self) -> bool:
        """Return True if `every_s` has passed since the last write."""
        return monotonic() - self._written >= self._every_s

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: list[float],
        *,
        last: bool,
    ) -> None:
        """Write the state.

        Raises:
            ExportError: the file cannot be written. After the last step this is only logged, as the
                model is still usable.
        """
        header = TrainingHeader(identity=self._identity, losses=losses)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": _random_states(),
            "masks": masks(model),
        }
        try:
            line = msgspec.json.encode(header)
            write_sealed(self.path, line, lambda file: torch.save(state, file))
        except ExportError as error:
            if not last:
                raise
            logger.warning("%s; the training is finished and continues without it", error)
        self._written = monotonic()


def read_header(path: Path) -> TrainingHeader:
    """Read the settings and progress of a saved training run, and verify the whole file.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    with opened(path) as (line, _):
        return _header(path, line)


def saved_steps(path: Path, identity: Mapping[str, str]) -> int | None:
    """Return the number of saved steps, or None if the file belongs to another run.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    header = read_header(path)
    is_same_run = all(header.identity.get(name) == value for name, value in identity.items())
    return len(header.losses) if is_same_run else None


def _header(path: Path, line: bytes) -> TrainingHeader:
    try:
        return msgspec.json.decode(line, type=TrainingHeader)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is not a training checkpoint of this version of ms-compress ({error}); remove"
            " it to restart"
        ) from error


def _random_states() -> dict[str, Tensor]:
    """Return the states of torch's random generators, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        device_type = str(torch.accelerator.current_accelerator())
        states[device_type] = torch.get_device_module(device_type).get_rng_state()
    return states


def _set_random_states(states: dict[str, Tensor]) -> None:
    """Restore the generators of this machine's devices; the file may be from another machine."""
    torch.set_rng_state(states["cpu"])
    for device_type in states.keys() & _random_states().keys() - {"cpu"}:
        torch.get_device_module(device_type).set_rng_state(states[device_type])


class BlockHeader(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-compress-block/1", tag_field="format"
):
    """Settings on which a stored decoder layer depends."""

    identity: dict[str, str]


@frozen(kw_only=True, eq=False)
class BlockFiles:
    """Decoder layers stored in a folder, which is created by the first one."""

    folder: Path
    identity: Mapping[str, str]
    """Settings that the calibration depends on; files with other settings are rejected."""

    def load(self, name: str, block: nn.Module) -> bool:
        """Restore a decoder layer; return False if it is not stored.

        Raises:
            ConfigError: the file belongs to another run, or is damaged.
        """
        path = self.folder / name
        if not path.is_file():
            return False
        with opened(path) as (line, payload):
            try:
                header = msgspec.json.decode(line, type=BlockHeader)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{path} is not a layer stored by this version of ms-compress ({error}); remove"
                    f" {self.folder} to restart"
                ) from error
            check_identity(self.folder, header.identity, self.identity)
            block.load_state_dict(torch.load(payload, weights_only=True))
        return True

    def save(self, name: str, block: nn.Module) -> None:
        """Store a finished decoder layer.

        Raises:
            WriteError: the disk is full, or the folder cannot be written.
        """
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        header = msgspec.json.encode(BlockHeader(identity=dict(self.identity)))
        state = block.state_dict()
        write_sealed(self.folder / name, header, lambda file: torch.save(state, file))

    def remove(self) -> None:
        """Remove the stored layers, and the folder if it is then empty."""
        if self.folder.is_dir():
            with writing(self.folder):
                for path in self.folder.glob("model.layers.*"):
                    path.unlink()
                if not any(self.folder.iterdir()):
                    self.folder.rmdir()


def calibration_identity(settings: Mapping[str, str], batches: Sequence[Tensor]) -> dict[str, str]:
    """Return the settings of a run and a digest of its calibration tokens."""
    tokens = [batch.cpu().contiguous().numpy().tobytes() for batch in batches]
    shapes = repr([tuple(batch.shape) for batch in batches]).encode()
    return {**settings, "calibration tokens": digest_of(shapes, *tokens)}


def identity_of(
    model: nn.Module, tokens: Mapping[str, Tensor], options: Any, extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings that the steps of a training run depend on.

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


def write_sealed(path: Path, header: bytes, write: Callable[[BinaryIO], object]) -> None:
    """Write a sealed file, which appears complete or not at all.

    Args:
        path: path of the file; an existing file is replaced.
        header: one line, without a line end.
        write: called with the file to write the payload sequentially.

    Raises:
        ExportError: the file cannot be written.
    """

    def write_all(file: BinaryIO) -> None:
        # A placeholder, as the digest is only known once the payload is written.
        file.write(b"0" * DIGEST_CHARACTERS + b"\n")
        hashing = _Hashing(file)
        hashing.write(header + b"\n")
        write(hashing)  # type: ignore[arg-type]  # only its write method is used
        file.seek(0)
        file.write(hashing.hash.hexdigest().encode())

    replace(path, write_all)


@contextmanager
def opened(path: Path) -> Iterator[tuple[bytes, BinaryIO]]:
    """Open a sealed file after checking its digest; yields the header, and the file at its payload.

    Raises:
        ConfigError: the file is damaged, or cannot be read.
    """
    try:
        file = BufferedReader(open_file(path, error=ConfigError))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    with file:
        digest_line = file.read(DIGEST_CHARACTERS + 1)
        if digest_line != _digest(file) + b"\n":
            raise ConfigError(
                f"{path} is damaged: its contents do not match its digest; remove it to restart"
            )
        # The digest read the whole file; return to the header.
        file.seek(len(digest_line))
        header = file.readline(HEADER_BYTES)
        yield header.removesuffix(b"\n"), file


class _Hashing:
    """A writer that hashes the data it passes on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.blake2b()

    def write(self, content: bytes | bytearray | memoryview) -> int:
        self.hash.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _digest(file: BinaryIO) -> bytes:
    """Return the hex digest of the rest of a file."""
    digest = hashlib.blake2b()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest().encode()
