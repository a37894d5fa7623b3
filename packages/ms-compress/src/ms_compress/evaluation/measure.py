"""Measure exported folders in their deployment runtimes.

Perplexity is computed from the runtime's own logits. A speed is the number of tokens divided by the
median time of the rounds, which alternate over all runtimes so that a slow moment of the host
affects all of them equally. A ratio is a speed divided by the baseline's printed speed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from attrs import Factory, frozen
from torch import Tensor

from ms_compress.corpus import held_out
from ms_compress.errors import ConfigError, DataError
from ms_compress.evaluation.options import Evaluation
from ms_compress.evaluation.perplexity import perplexity
from ms_compress.report import Report, Result
from ms_compress.targets.footprint import Footprint, footprint
from ms_compress.targets.target import Runtime, open_runtime
from ms_compress.text_ends import check_same_tokenizer

REPORT_SETTINGS = (
    "title",
    "sequence_length",
    "prefill_tokens",
    "decode_tokens",
    "rounds",
    "threads",
)
"""Settings that are copied into the report."""
Progress = Callable[[int, int, str], object]


@frozen(kw_only=True)
class _OpenModel:
    name: str
    footprint: Footprint
    runtime: Runtime
    times: list[tuple[float, float]] = Factory(list)


def evaluate(evaluation: Evaluation, *, progress: Progress | None = None) -> Report:
    """Measure every folder in its runtime, the baseline first.

    Args:
        evaluation: folders, text and settings.
        progress: called with the number of rows processed, the total over all folders, and the
            folder's name and runtime.

    Raises:
        ExportError: a folder cannot be read, or its runtime is not installed.
        ConfigError: the dataset or a folder has another tokenizer than the baseline.
        DataError: the text is unusable.
    """
    _check_tokenizers(evaluation)
    text = held_out(
        evaluation.dataset,
        sequence_length=evaluation.sequence_length,
        count=evaluation.sequences,
        chat=evaluation.baseline,
    )
    footprints = _folders(evaluation)
    for _, files in footprints:
        _check(files, text["tokens"], evaluation)
    with _threads(evaluation.threads):
        # All models stay open, as the timing rounds alternate between them.
        opened = [
            _OpenModel(
                name=name,
                footprint=files,
                runtime=open_runtime(files.folder, files.target, threads=evaluation.threads),
            )
            for name, files in footprints
        ]
        values = [
            _perplexity(item, text, _folder_progress(progress, item, i, len(opened)))
            for i, item in enumerate(opened)
        ]
        _time(opened, text["tokens"], evaluation)
    return Report(
        **{name: getattr(evaluation, name) for name in REPORT_SETTINGS},
        held_out_tokens=int((text["targets"] >= 0).sum()),
        results=tuple(
            _result(item, opened[0], value, evaluation)
            for item, value in zip(opened, values, strict=True)
        ),
    )


def _check_tokenizers(evaluation: Evaluation) -> None:
    """Check that all folders use the dataset's tokenizer."""
    dataset = Path(evaluation.dataset)
    compared: dict[str, str | Path | None] = {
        "baseline": evaluation.baseline,
        "dataset": dataset if dataset.is_dir() else None,
    }
    for name, folders in evaluation.models.items():
        for folder in [folders] if isinstance(folders, str | Path) else folders:
            compared[f"{name!r} ({folder})"] = folder
    check_same_tokenizer(compared, remedy="compare folders with the same tokenizer")


def _folders(evaluation: Evaluation) -> list[tuple[str, Footprint]]:
    """Return each folder's name and footprint, the baseline first."""
    footprints = [("float", footprint(evaluation.baseline))]
    for name, folders in evaluation.models.items():
        paths = [folders] if isinstance(folders, str | Path) else folders
        footprints += [(name, footprint(folder)) for folder in paths]
    if not footprints[0][1].is_plain:
        raise ConfigError(
            f"baseline must be a plain model, got the {footprints[0][1].target} model"
            f" {evaluation.baseline}; use the folder it was exported from"
        )
    return footprints


def _check(files: Footprint, tokens: Tensor, evaluation: Evaluation) -> None:
    """Check that the model of a folder can read the text."""
    if files.vocabulary is not None and int(tokens.max()) >= files.vocabulary:
        raise DataError(
            f"{evaluation.dataset}: tokens must be 0 to {files.vocabulary - 1} for {files.folder},"
            f" got {int(tokens.max())}; use text from the model's own tokenizer"
        )
    lengths = {
        "sequence_length": evaluation.sequence_length,
        "prefill_tokens and decode_tokens": evaluation.prefill_tokens + evaluation.decode_tokens,
    }
    for setting, length in lengths.items():
        if files.positions is not None and length > files.positions:
            raise ConfigError(
                f"{setting} must be at most {files.positions}, the positions of {files.folder}, got"
                f" {length}; lower them"
            )


def _folder_progress(
    progress: Progress | None, item: _OpenModel, number: int, folders: int
) -> Callable[[int, int], object] | None:
    """Convert one folder's progress to progress over all folders."""
    if progress is None:
        return None
    label = f"{item.name} in {item.runtime.name}"
    return lambda done, rows: progress(number * rows + done, folders * rows, label)


def _perplexity(
    item: _OpenModel,
    text: Mapping[str, Tensor],
    progress: Callable[[int, int], object] | None,
) -> float:
    try:
        return perplexity(item.runtime, text, progress=progress)
    except DataError as error:
        raise DataError(f"{item.footprint.folder}: {error}") from error


def _time(opened: Sequence[_OpenModel], tokens: Tensor, evaluation: Evaluation) -> None:
    """Time all folders in alternating rounds, after a warmup."""
    prompt = tokens.flatten()[: evaluation.prefill_tokens].tolist()
    if len(prompt) < evaluation.prefill_tokens:
        raise DataError(
            f"prefill_tokens needs {evaluation.prefill_tokens} held-out tokens, got {len(prompt)};"
            " lower it, or use a longer held-out set"
        )
    for item in opened:
        # The first call allocates the caches, and may pack weights for the CPU.
        item.runtime.decode(prompt, 2)
    for _ in range(evaluation.rounds):
        for item in opened:
            item.times.append(item.runtime.decode(prompt, evaluation.decode_tokens))


def _result(item: _OpenModel, base: _OpenModel, value: float, evaluation: Evaluation) -> Result:
    tokens = (evaluation.prefill_tokens, evaluation.decode_tokens)

    def speed(model: _OpenModel, part: int) -> float:
        return tokens[part] / median(times[part] for times in model.times)

    return Result(
        model=item.name,
        runtime=item.runtime.name,
        folder=str(item.footprint.folder),
        scheme=item.footprint.scheme,
        perplexity=value,
        size_bytes=item.footprint.size_bytes,
        bits_a_weight=item.footprint.bits_a_weight,
        prefill_tokens_per_s=speed(item, 0),
        decode_tokens_per_s=speed(item, 1),
        prefill_ratio=speed(item, 0) / speed(base, 0),
        decode_ratio=speed(item, 1) / speed(base, 1),
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
