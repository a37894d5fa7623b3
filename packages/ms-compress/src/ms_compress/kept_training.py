"""The state of a training in one file, so that what was killed goes on to the same weights."""

import hashlib
import logging
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor, nn

from ms_compress.durable import replace, writing
from ms_compress.errors import ConfigError, ExportError
from ms_compress.layers import prepared_layers
from ms_compress.pruning import masks, set_masks

__all__ = ["KeptTraining", "facts_of", "steps_held"]

logger = logging.getLogger(__name__)


class KeptTraining:
    """Writes what the next steps follow from beside, puts it in place whole, reads it.

    That is the model, its masks, the optimizer and the state of torch's generators.

    Args:
        path: of the file, which may be there.
        facts: what the steps follow from; another run's file is refused.
        kept_for: those of them that the caller gave.
        every_s: seconds between two writes.
    """

    def __init__(self, path: Path, facts: list[bytes], *, kept_for: str, every_s: float) -> None:
        self.path = path
        self._key = hashlib.sha256(b"\0".join(facts)).hexdigest()
        self._kept_for = kept_for
        self._every_s = every_s
        self._written = monotonic()

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """Losses of the steps already made; model and optimizer are as they were then.

        Raises:
            ConfigError: the file is of another run, or damaged.
        """
        if not self.path.is_file():
            return []
        try:
            state = torch.load(self.path, weights_only=True)
            key = state["key"]
        except Exception as error:  # whatever torch makes of a damaged file
            raise ConfigError(
                f"{self.path} is damaged ({type(error).__name__}); remove it to begin anew"
            ) from error
        if key != self._key:
            raise ConfigError(
                f"{self.path} is of a run with other settings, tokens or layers; give those again,"
                " or remove it to begin anew"
            )
        if "random" not in state:
            raise ConfigError(
                f"{self.path} does not hold the state of random numbers, which an older version"
                " left out; remove it to begin anew"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        set_masks(model, state["masks"])
        _set_random_states(state["random"])
        return list(state["losses"])

    def keep(
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
        state = {
            "key": self._key,
            "kept_for": self._kept_for,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": _random_states(),
            "masks": masks(model),
            "losses": losses,
        }
        try:
            with writing(self.path):
                replace(self.path, lambda file: torch.save(state, file))
        except ExportError as error:
            if not last:
                raise
            logger.warning("%s; the training is done, and goes on without", error)
        self._written = monotonic()


def steps_held(path: Path, kept_for: str) -> int | None:
    """How many steps a file holds; None if it is no file of a training kept for just this."""
    try:
        state = torch.load(path, weights_only=True, mmap=True)
        return len(state["losses"]) if state["kept_for"] == kept_for else None
    except Exception:  # whatever torch makes of a damaged file
        return None


def facts_of(model: nn.Module, tokens: Tensor, *settings: object) -> list[bytes]:
    """What the steps of a training follow from: settings, text, parameters' shapes and schemes."""
    shapes = [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    schemes = [(name, layer.scheme, layer.activations) for name, layer in prepared_layers(model)]
    text = tokens.cpu().contiguous().numpy().tobytes()
    return [repr((settings, shapes, schemes)).encode(), hashlib.sha256(text).digest()]


def _random_states() -> dict[str, Tensor]:
    """Of torch's generators, which dropout draws from, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        states[kind] = torch.get_device_module(kind).get_rng_state()
    return states


def _set_random_states(states: dict[str, Tensor]) -> None:
    """A file may be of a machine with another accelerator, or without."""
    torch.set_rng_state(states["cpu"])
    for kind in states.keys() & _random_states().keys() - {"cpu"}:
        torch.get_device_module(kind).set_rng_state(states[kind])
