"""The checkpoint of a training, one sealed file: what was killed goes on to the same weights.

The file names what its steps follow from: a run with other settings is refused in a line that names
which of them differ, as the weights would be those of neither run.
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
from ms_compress.training.identity import describe_change
from ms_compress.training.sealed_file import opened, write_sealed

logger = logging.getLogger(__name__)


class TrainingHeader(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-compress-training/3", tag_field="format"
):
    """What a saved training follows from, and how far it is."""

    identity: dict[str, str]
    """By the setting's name; digests of what is large."""
    losses: list[float]
    """The loss of each step made."""


class TrainingCheckpoint:
    """Saves and loads the model, its masks, the optimizer and the state of torch's generators.

    Args:
        path: of the file, which may be there; it is replaced whole.
        identity: what the steps follow from; another run's file is refused.
        every_s: seconds between two writes.
    """

    def __init__(self, path: Path, identity: Mapping[str, str], *, every_s: float) -> None:
        self.path = path
        self._identity = dict(identity)
        self._every_s = every_s
        self._written = monotonic()

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """Put model and optimizer back; return the losses of the steps already made.

        Raises:
            ConfigError: the file is of another run, or damaged.
        """
        if not self.path.is_file():
            return []
        with opened(self.path) as (line, payload):
            header = _header(self.path, line)
            _check_identity(self.path, header.identity, self._identity)
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
        """Write the state, if it is time to or the step was the last.

        Raises:
            ExportError: it cannot be written. After the last step that is only logged, as all that
                is left to do is to use the model.
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
            logger.warning("%s; the training is done, and goes on without", error)
        self._written = monotonic()


def read_header(path: Path) -> TrainingHeader:
    """Read what a saved training follows from and how far it is; every byte is checked.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    with opened(path) as (line, _):
        return _header(path, line)


def saved_steps(path: Path, identity: Mapping[str, str]) -> int | None:
    """Return how many steps a file holds; None if it is of a run with another identity.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    header = read_header(path)
    same = all(header.identity.get(name) == value for name, value in identity.items())
    return len(header.losses) if same else None


def _header(path: Path, line: bytes) -> TrainingHeader:
    try:
        return msgspec.json.decode(line, type=TrainingHeader)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} holds no training of this version of ms-compress ({error}); remove it to begin"
            " anew"
        ) from error


def _check_identity(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    if changed:
        changes = [describe_change(name, before.get(name), now.get(name)) for name in changed]
        raise ConfigError(
            f"{path} is of a run with other settings: {', '.join(changes)}; give those again, or"
            " remove it to begin anew"
        )


def _random_states() -> dict[str, Tensor]:
    """Return the states of torch's generators, which dropout draws from, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        states[kind] = torch.get_device_module(kind).get_rng_state()
    return states


def _set_random_states(states: dict[str, Tensor]) -> None:
    """Set the states of the generators that this machine has; a file may be another machine's."""
    torch.set_rng_state(states["cpu"])
    for kind in states.keys() & _random_states().keys() - {"cpu"}:
        torch.get_device_module(kind).set_rng_state(states[kind])
