"""Mixes several sources in one stream: their names, their tokenizers, and the ledger of draws."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from ms_data.disk.format import Index
from ms_data.disk.split import dataset_folder
from ms_data.errors import SettingError
from ms_data.streams.mixture import Mixture, Phase, Weights
from ms_data.streams.share import BatchStream

B = TypeVar("B")
Sources = str | Path | Mapping[str, str | Path]
"""A folder of shards, or several, by name."""

_log = logging.getLogger(__name__)


class MixedStream(BatchStream[B]):
    """A stream that draws from one source or several, in exact proportion.

    A subclass names its sources, opens them, and then mixes them.
    """

    _mixture: Mixture
    _last: int | None

    def _name_sources(self, sources: Sources) -> None:
        if isinstance(sources, str | Path):
            sources = {dataset_folder(sources).name: sources}
        if not sources:
            raise SettingError("sources names no folder; name at least one to learn from")
        self.folders = tuple(dataset_folder(folder) for folder in sources.values())
        """Where the sources lie, with the tokenizer that made them."""
        self.names = tuple(sources)
        """The sources; `task` counts them from 0."""

    def _source_seed(self, number: int) -> int:
        # Far apart, so that a source's order is not that of its neighbour under the next seed.
        seed: int = self._settings["seed"]
        return seed * 1_000_003 + number

    def _mix(
        self,
        indices: Sequence[Index],
        sizes: Sequence[int],
        *,
        weights: Weights | None,
        epochs: int | None,
        max_epochs: Mapping[str, float] | None,
    ) -> None:
        """Begin the ledger.

        Args:
            indices: of the sources' datasets.
            sizes: how many samples each holds.
            weights: as `Mixture` takes them; None draws as many of each as it holds.
            epochs: after how many times all samples the stream ends.
            max_epochs: how many times each source is read at most, by name.

        Raises:
            SettingError: two sources were built with different tokenizers, or the ledger cannot
                be.
        """
        self._check_tokenizers(indices)
        self._indices = tuple(indices)
        self._sizes = tuple(sizes)
        self._settings["sources"] = {
            name: index.fingerprint for name, index in zip(self.names, indices, strict=True)
        }
        limits = {}
        if max_epochs is not None:
            self._settings["max_epochs"] = {name: float(one) for name, one in max_epochs.items()}
            held = dict(zip(self.names, sizes, strict=True))
            for name, most in max_epochs.items():
                if not 0 <= most < float("inf"):
                    raise SettingError(f"max_epochs of {name!r} is {most}; it must be 0 or more")
                limits[name] = int(most * held.get(name, 0))
        given: Weights = [float(size) for size in sizes] if weights is None else weights
        self._mixture = Mixture(self.names, given, limits=limits)
        self._given = _planned(self._mixture.phases)
        self._last = None if epochs is None else epochs * sum(sizes)

    def _check_tokenizers(self, indices: Sequence[Index]) -> None:
        first = indices[0]
        for name, other in zip(self.names, indices, strict=True):
            if (other.tokenizer, other.end_of_text) != (first.tokenizer, first.end_of_text):
                raise SettingError(
                    f"sources {self.names[0]!r} and {name!r} were built with different tokenizers "
                    "or ends of text, so their tokens mean different things; build both with one"
                )

    @property
    def samples_per_epoch(self) -> int:
        """Samples of all sources together."""
        return sum(self._sizes)

    @property
    def vocabulary_size(self) -> int:
        """Every token is below it."""
        return max(index.vocabulary_size for index in self._indices)

    @property
    def fingerprint(self) -> str:
        """Name the data by its content."""
        if len(self._indices) == 1:
            return self._indices[0].fingerprint
        all_of_them = " ".join(index.fingerprint for index in self._indices)
        return xxhash.xxh3_128_hexdigest(all_of_them.encode())

    @property
    def mixture(self) -> Mixture:
        """The ledger of what was drawn from where."""
        return self._mixture

    def change_weights(self, weights: Weights) -> int:
        """Change the weights from now on; see `Mixture.change`."""
        return self._mixture.change(weights)

    @property
    def _end(self) -> int | None:
        """After how many samples the stream ends: all its epochs, or all that sources may give."""
        ends = [one for one in (self._last, self._mixture.end) if one is not None]
        return min(ends, default=None)

    def _ledger(self) -> dict[str, Any]:
        """Return the ledger, and the weights that this stream was made with."""
        return {"mixture": self._mixture.state_dict(), "weights": self._given}

    def _load_ledger(self, position: Mapping[str, Any]) -> None:
        """Go to a saved ledger; other weights than those it began with take effect from here."""
        before = position["weights"]
        if not _is_plan(before, len(self.names)):
            raise ValueError(f"weights {before!r} are no phases of {len(self.names)} sources")
        self._mixture.load_state_dict(position["mixture"])
        if before == self._given:
            return
        plan = [Phase(start, weights) for start, weights in self._given]
        at = self._mixture.position
        was = self._mixture.weights
        start = self._mixture.change(plan)
        now = self._mixture.weights
        named = ", ".join(
            f"{name} {was[name]:g} -> {now[name]:g}"
            for name in self.names
            if was[name] != now[name]
        )
        _log.warning(
            "weights changed on resume after %d samples, in effect from %d on: %s",
            at,
            start,
            named or "in later phases",
        )


def _planned(phases: Iterable[Phase]) -> list[list[Any]]:
    return [[phase.start, list(phase.weights)] for phase in phases]


def _is_plan(value: Any, sources: int) -> bool:
    """Return whether a JSON value can be what `_planned` gives."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(phase, list) and len(phase) == 2 for phase in value)
        and all(type(start) is int and isinstance(weights, list) for start, weights in value)
        and all(len(weights) == sources for _, weights in value)
        and all(isinstance(one, int | float) for _, weights in value for one in weights)
    )
