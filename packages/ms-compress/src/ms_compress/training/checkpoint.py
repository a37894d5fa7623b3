"""Checkpoint of a training in one sealed file, from which a killed run resumes exactly.

The file records the settings that its steps depend on. A run with other settings is refused with a
message that names the differences, as its weights would match neither run.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

import msgspec
import torch
from torch import Tensor, nn

from ms_compress.errors import ConfigError, ExportError
from ms_compress.methods.pruning import masks, set_masks
from ms_compress.training.identity import check_identity
from ms_compress.training.sealed_file import opened, write_sealed

logger = logging.getLogger(__name__)


class TrainingHeader(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-compress-training/3", tag_field="format"
):
    """Settings and progress of a saved training."""

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

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: list[float],
        *,
        last: bool,
    ) -> None:
        """Write the state if `every_s` has passed or this was the last step.

        Raises:
            ExportError: the file cannot be written. After the last step this is only logged, as the
                model is still usable.
        """
        if monotonic() - self._written < self._every_s and not last:
            return
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
    """Read the settings and progress of a saved training; every byte is checked.

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
