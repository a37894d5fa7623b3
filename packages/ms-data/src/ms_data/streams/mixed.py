"""Base class of streams that mix several sources."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import xxhash

from ms_data.arguments import check_number, check_type
from ms_data.disk.format import Index
from ms_data.disk.remote import RemoteShards
from ms_data.disk.split import any_folder, dataset_folder
from ms_data.errors import SettingError, printable
from ms_data.streams.mixture import Mixture, Phase, Weights
from ms_data.streams.share import BatchStream

B = TypeVar("B")
Sources = str | Path | RemoteShards | Mapping[str, str | Path | RemoteShards]
"""A folder of shards, on a disk or in an object store, or several by name."""

_log = logging.getLogger(__name__)


class MixedStream(BatchStream[B]):
    """A stream that draws from one or more sources in exact proportions.

    Subclasses call `_name_sources`, open the sources, and then call `_mix`.
    """

    _reads_remote: ClassVar[bool] = False
    """Whether sources may be in object stores."""
    _mixture: Mixture
    _sample_limit: int | None

    def _name_sources(self, sources: Sources) -> None:
        if isinstance(sources, str | Path | RemoteShards):
            folder = self._folder_of(sources)
            sources = {folder.name: folder}
        if not isinstance(sources, Mapping):
            raise SettingError(
                f"sources must be a folder or a dict, got {printable(repr(sources))}; pass a"
                " dataset folder, or a dict of names and folders"
            )
        if not sources:
            raise SettingError("sources is empty; pass at least one dataset folder")
        self.folders = tuple(self._folder_of(folder) for folder in sources.values())
        """Dataset folders of the sources; each contains its tokenizer."""
        self.names = tuple(sources)
        """Source names; `task` is an index into them."""

    def _folder_of(self, folder: str | Path | RemoteShards) -> Any:
        """Return a `Path`, or `RemoteShards` if the stream reads object stores."""
        return any_folder(folder) if self._reads_remote else dataset_folder(folder)  # type: ignore[arg-type]

    def _source_seed(self, number: int) -> int:
        # A large stride, so that source i with seed s + 1 differs from source i + 1 with seed s.
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
        """Create the mixture.

        Args:
            indices: dataset indices of the sources.
            sizes: number of samples of each source.
            weights: weights as in `Mixture`; None draws in proportion to the sizes.
            epochs: number of passes over all samples after which the stream ends.
            max_epochs: maximum number of passes over each source, by name.

        Raises:
            SettingError: the sources have different tokenizers, or the mixture is invalid.
        """
        self._check_tokenizers(indices)
        self._indices = tuple(indices)
        self._sizes = tuple(sizes)
        self._settings["sources"] = {
            name: index.fingerprint for name, index in zip(self.names, indices, strict=True)
        }
        limits = {}
        if max_epochs is not None:
            description = "a dict of numbers by source"
            check_type("max_epochs", max_epochs, Mapping, description, error=SettingError)
            for name, limit in max_epochs.items():
                check_number(f"max_epochs of {name!r}", limit, minimum=0, error=SettingError)
            self._settings["max_epochs"] = {
                name: float(limit) for name, limit in max_epochs.items()
            }
            size_of = dict(zip(self.names, sizes, strict=True))
            for name, limit in max_epochs.items():
                limits[name] = int(limit * size_of.get(name, 0))  # in samples
        initial: Weights = [float(size) for size in sizes] if weights is None else weights
        self._mixture = Mixture(self.names, initial, limits=limits)
        # Saved with the state, to detect weights that were changed by the user before a resume.
        self._initial_phases = _phases_to_json(self._mixture.phases)
        self._sample_limit = None if epochs is None else epochs * sum(sizes)

    def _check_tokenizers(self, indices: Sequence[Index]) -> None:
        first = indices[0]
        for name, index in zip(self.names, indices, strict=True):
            if (index.tokenizer, index.end_of_text) != (first.tokenizer, first.end_of_text):
                raise SettingError(
                    f"sources {self.names[0]!r} and {name!r} were built with different tokenizers "
                    "or end-of-text tokens, so they cannot be mixed; build both with the same one"
                )

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of all sources together."""
        return sum(self._sizes)

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size; all tokens are below it."""
        return max(index.vocabulary_size for index in self._indices)

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the content of the data."""
        if len(self._indices) == 1:
            return self._indices[0].fingerprint
        fingerprints = " ".join(index.fingerprint for index in self._indices)
        return xxhash.xxh3_128_hexdigest(fingerprints.encode())

    @property
    def mixture(self) -> Mixture:
        """The mixture, which counts the samples drawn from every source."""
        return self._mixture

    def change_weights(self, weights: Weights) -> int:
        """Change the weights for the following samples; see `Mixture.change`."""
        return self._mixture.change(weights)

    @property
    def _end(self) -> int | None:
        """Number of samples after which the stream ends, by `epochs` or the sources' limits."""
        ends = [end for end in (self._sample_limit, self._mixture.end) if end is not None]
        return min(ends, default=None)

    def _mixture_state(self) -> dict[str, Any]:
        """Return the state of the mixture and the weights that the stream was created with."""
        return {"mixture": self._mixture.state_dict(), "weights": self._initial_phases}

    def _load_mixture_state(self, position: Mapping[str, Any]) -> None:
        """Restore a mixture; this stream's weights, if different, apply from here on."""
        saved_weights = position["weights"]
        if not _is_plan(saved_weights, len(self.names)):
            raise ValueError(
                f"weights {saved_weights!r} are not phases of {len(self.names)} sources"
            )
        self._mixture.load_state_dict(position["mixture"])
        if saved_weights == self._initial_phases:
            return
        plan = [Phase(start, weights) for start, weights in self._initial_phases]
        position_before = self._mixture.position
        old_weights = self._mixture.weights
        start = self._mixture.change(plan)
        new_weights = self._mixture.weights
        changes = ", ".join(
            f"{name} {old_weights[name]:g} -> {new_weights[name]:g}"
            for name in self.names
            if old_weights[name] != new_weights[name]
        )
        _log.warning(
            "weights changed on resume after %d samples, in effect from %d on: %s",
            position_before,
            start,
            changes or "in later phases",
        )


def _phases_to_json(phases: Iterable[Phase]) -> list[list[Any]]:
    return [[phase.start, list(phase.weights)] for phase in phases]


def _is_plan(value: Any, sources: int) -> bool:
    """Return whether a JSON value has the format of `_phases_to_json`."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(phase, list) and len(phase) == 2 for phase in value)
        and all(type(start) is int and isinstance(weights, list) for start, weights in value)
        and all(len(weights) == sources for _, weights in value)
        and all(isinstance(weight, int | float) for _, weights in value for weight in weights)
    )
