"""Training data from folders that ms-data wrote; the one place that opens them."""

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.files.untrusted import check_path

Folders = str | Mapping[str, str]
"""A folder that `ms-data build --chat-template` wrote, or several by the names of their tasks."""


@frozen
class _DataRank:
    """Which rows an engine reads, as ms-data asks."""

    rank: int
    count: int


def folders_of(dataset: Any) -> Folders:
    """Return a dataset's folders as texts.

    Raises:
        ConfigError: it is neither a folder nor a table of them.
    """
    folders = dataset if isinstance(dataset, Mapping) else {"": dataset}
    for folder in folders.values():
        check_path("dataset", folder, error=ConfigError)
    if folders is not dataset:
        return str(dataset)
    return {name: str(folder) for name, folder in folders.items()}


def instructions(dataset: Folders, engine: Engine, **settings: Any) -> Any:
    """Open a stream of packed conversations; see `ms_data.InstructionStream` for its settings."""
    from ms_data import InstructionStream

    sources: Any = dataset
    return InstructionStream(
        sources, place=_DataRank(engine.data_rank, engine.data_ranks), **settings
    )


def preferences(dataset: Folders, engine: Engine, **settings: Any) -> Any:
    """Open a stream of preference pairs; see `ms_data.PreferenceStream` for its settings.

    Raises:
        ConfigError: the folder holds no pairs, or there are several.
    """
    from ms_data import PreferenceStream, Samples

    if not isinstance(dataset, str):
        raise ConfigError("dataset is a table; preference pairs come from one folder")
    if Samples(dataset).kind != "preferences":
        raise ConfigError(
            f"{dataset} holds conversations and no preference pairs; build it with "
            "`ms-data build --pairs`, or run `ms-align sft`"
        )
    return PreferenceStream(
        dataset, place=_DataRank(engine.data_rank, engine.data_ranks), **settings
    )


def without_held_out(dataset: Folders) -> list[str]:
    """List the folders that have no split of samples that are never learned from."""
    from ms_data import inspect

    return [folder for folder in _each(dataset) if "held_out" not in inspect(folder).splits]


def held_out_prompts(dataset: Folders, count: int) -> tuple[list[list[int]], Any]:
    """Read the first held-out prompts, up to where the assistant speaks; and the tokenizer."""
    from ms_data import PairSample, Samples, Tokenizer

    folders = _each(dataset)
    prompts: list[list[int]] = []
    for folder in folders:
        samples = Samples(folder, "held_out")
        for at in range(min(len(samples), -(-count // len(folders)))):
            one = samples[at]
            part = one.chosen if isinstance(one, PairSample) else one
            prompts.append(part.tokens[: int(part.loss_mask.argmax())].tolist())
    return [prompt for prompt in prompts if prompt][:count], Tokenizer.load(folders[0])


def first_batches(
    stream: Iterable[Mapping[str, Any]], most: int | None
) -> Iterable[Mapping[str, Any]]:
    """Yield the first batches of a stream, or all of them."""
    for number, batch in enumerate(stream):
        if number == most:
            return
        yield batch


def _each(dataset: Folders) -> list[str]:
    return [dataset] if isinstance(dataset, str) else list(dataset.values())
