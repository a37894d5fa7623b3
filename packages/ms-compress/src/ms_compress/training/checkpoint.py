"""The state of a training in one sealed file, so that what was killed goes on to the same weights.

The file names what its steps follow from: a run with other settings is told which of them differ,
and is refused, as the weights would be those of neither run.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import torch
from attrs import asdict
from torch import Tensor, nn

from ms_compress.errors import ConfigError, ExportError
from ms_compress.methods.pruning import masks, set_masks
from ms_compress.quantisation.layers import prepared_layers
from ms_compress.training.sealed_file import opened, write_sealed

__all__ = ["DIGEST", "KeptTraining", "digest_of", "facts_of", "read_header", "steps_held"]

DIGEST = "blake2b:"
"""Begins a fact that stands for something too large to be shown."""

logger = logging.getLogger(__name__)


class TrainingHeader(
    msgspec.Struct, frozen=True, kw_only=True, tag="ms-compress-training/2", tag_field="format"
):
    """What a kept training follows from, and how far it is."""

    facts: dict[str, str]
    """By the setting's name; digests of what is large."""
    losses: list[float]
    """Of the steps made."""


class KeptTraining:
    """Writes what the next steps follow from beside, puts it in place whole, reads it.

    That is the model, its masks, the optimizer and the state of torch's generators.

    Args:
        path: of the file, which may be there.
        facts: what the steps follow from; another run's file is refused.
        every_s: seconds between two writes.
    """

    def __init__(self, path: Path, facts: Mapping[str, str], *, every_s: float) -> None:
        self.path = path
        self._facts = dict(facts)
        self._every_s = every_s
        self._written = monotonic()

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        """Losses of the steps already made; model and optimizer are as they were then.

        Raises:
            ConfigError: the file is of another run, or damaged.
        """
        if not self.path.is_file():
            return []
        with opened(self.path) as (line, payload):
            header = _header(self.path, line)
            _check_facts(self.path, header.facts, self._facts)
            state = torch.load(payload, weights_only=True)  # type: ignore[arg-type]  # a file
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        set_masks(model, state["masks"])
        _set_random_states(state["random"])
        return list(header.losses)

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
        header = TrainingHeader(facts=self._facts, losses=losses)
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
    """What a kept training follows from and how far it is; every byte of the file is checked.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    with opened(path) as (line, _):
        return _header(path, line)


def steps_held(path: Path, kept_for: Mapping[str, str]) -> int | None:
    """How many steps a file holds; None if it was kept for anything but just this.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    header = read_header(path)
    same = all(header.facts.get(name) == fact for name, fact in kept_for.items())
    return len(header.losses) if same else None


def facts_of(
    model: nn.Module, tokens: Mapping[str, Tensor], how: Any, kept_for: Mapping[str, str]
) -> dict[str, str]:
    """What the steps of a training follow from, by name.

    Args:
        model: as it is prepared.
        tokens: the text, by the tensors' names.
        how: the settings, an attrs value.
        kept_for: what the caller adds.
    """
    shapes = [(name, tuple(value.shape)) for name, value in model.named_parameters()]
    schemes = [(name, layer.scheme, layer.activations) for name, layer in prepared_layers(model)]
    text = [value.cpu().contiguous().numpy().tobytes() for value in tokens.values()]
    settings = {f"tuning.{name}": repr(value) for name, value in asdict(how).items()}
    layers = digest_of(repr((shapes, schemes)).encode())
    return {**kept_for, **settings, "layers": layers, "tokens": digest_of(*text)}


def digest_of(*contents: bytes) -> str:
    """What stands for contents that are too large to be shown."""
    whole = hashlib.blake2b(digest_size=16)
    for content in contents:
        whole.update(len(content).to_bytes(8, "little") + content)
    return DIGEST + whole.hexdigest()


def _header(path: Path, line: bytes) -> TrainingHeader:
    try:
        return msgspec.json.decode(line, type=TrainingHeader)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} holds no training of this version of ms-compress ({error}); remove it to begin"
            " anew"
        ) from error


def _check_facts(path: Path, held: Mapping[str, str], now: Mapping[str, str]) -> None:
    names = [name for name in {**now, **held} if held.get(name) != now.get(name)]
    if names:
        told = ", ".join(_change(name, held.get(name), now.get(name)) for name in names)
        raise ConfigError(
            f"{path} is of a run with other settings: {told}; give those again, or remove it to"
            " begin anew"
        )


def _change(name: str, before: str | None, now: str | None) -> str:
    if any(fact is not None and fact.startswith(DIGEST) for fact in (before, now)):
        return f"{name} changed"
    return f"{name} is {now or 'not given'}, was {before or 'not given'}"


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
