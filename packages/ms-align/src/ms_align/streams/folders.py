"""Opens dataset folders written by ms-data."""

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.files.untrusted import check_path

Folders = str | Mapping[str, str]
"""Folder written by `ms-data build --chat-template`, or several by task name."""


@frozen
class _DataRank:
    """Data-parallel rank in the form that ms-data expects."""

    rank: int
    count: int


def folders_of(dataset: Any) -> Folders:
    """Return the folders of a dataset as strings.

    Raises:
        ConfigError: the dataset is neither a folder nor a table of folders.
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
        ConfigError: the folder has no pairs, or `dataset` is a table.
    """
    from ms_data import PreferenceStream, Samples

    if not isinstance(dataset, str):
        raise ConfigError(
            "preference pairs must come from one folder, and dataset is a table; use one folder"
        )
    if Samples(dataset).kind != "preferences":
        raise ConfigError(
            f"{dataset} has conversations instead of preference pairs; build it with "
            "`ms-data build --pairs`, or run `ms-align sft`"
        )
    return PreferenceStream(
        dataset, place=_DataRank(engine.data_rank, engine.data_ranks), **settings
    )


def unpaired(dataset: Folders, engine: Engine, **settings: Any) -> Any:
    """Open a stream of labeled responses; see `ms_data.UnpairedStream` for its settings.

    Raises:
        ConfigError: the folder has neither labeled responses nor pairs, or `dataset` is a table.
    """
    from ms_data import Samples, UnpairedStream

    if not isinstance(dataset, str):
        raise ConfigError(
            "labeled responses must come from one folder, and dataset is a table; use one folder"
        )
    if Samples(dataset).kind not in ("unpaired", "preferences"):
        raise ConfigError(
            f"{dataset} has conversations without labels; build it with `ms-data build --unpaired` "
            "or `--pairs`, or run `ms-align sft`"
        )
    return UnpairedStream(dataset, place=_DataRank(engine.data_rank, engine.data_ranks), **settings)


def without_held_out(dataset: Folders) -> list[str]:
    """List the folders without a `held_out` split."""
    from ms_data import inspect

    return [folder for folder in _as_list(dataset) if "held_out" not in inspect(folder).splits]


def have_media(dataset: Folders) -> bool:
    """Return whether a folder has conversations with images, videos or audio."""
    from ms_data import Samples

    return any(Samples(folder).kind == "media" for folder in _as_list(dataset))


def held_out_prompts(dataset: Folders, count: int) -> tuple[list[list[int]], Any]:
    """Return the first held-out prompts, up to the assistant's answer, and the tokenizer."""
    from ms_data import PairSample, Samples, Tokenizer, UnpairedSample

    folders = _as_list(dataset)
    prompts: list[list[int]] = []
    # The same number of prompts from each folder, rounded up and cut at the end.
    for folder in folders:
        samples = Samples(folder, "held_out")
        for index in range(min(len(samples), -(-count // len(folders)))):
            sample = samples[index]
            if isinstance(sample, PairSample):
                conversation = sample.chosen
            else:
                conversation = sample.response if isinstance(sample, UnpairedSample) else sample
            # argmax of the mask is its first True, where the answer starts.
            prompts.append(conversation.tokens[: int(conversation.loss_mask.argmax())].tolist())
    return [prompt for prompt in prompts if prompt][:count], Tokenizer.load(folders[0])


def first_batches(
    stream: Iterable[Mapping[str, Any]], limit: int | None
) -> Iterable[Mapping[str, Any]]:
    """Yield the first `limit` batches of a stream; None for all."""
    for number, batch in enumerate(stream):
        if number == limit:
            return
        yield batch


def _as_list(dataset: Folders) -> list[str]:
    return [dataset] if isinstance(dataset, str) else list(dataset.values())
