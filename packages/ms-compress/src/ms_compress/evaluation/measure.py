"""Measurement of exported folders in the runtimes that people deploy on.

Perplexity is computed from the runtime's own logits. A speed is the number of tokens over the
median time of the rounds, which alternate over all runtimes so that a slow moment of the host slows
all of them alike. A ratio is a speed over the baseline's: the quotient of the two printed numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from attrs import Factory, frozen
from torch import Tensor

from ms_compress.errors import ConfigError, DataError
from ms_compress.evaluation.options import Evaluation
from ms_compress.evaluation.perplexity import perplexity
from ms_compress.report import Report, Result
from ms_compress.targets.footprint import Footprint, footprint
from ms_compress.targets.target import Runtime, open_runtime
from ms_compress.text_ends import check_same_tokenizer
from ms_compress.training.corpus import held_out

REPORTED = ("title", "sequence_length", "prefill_tokens", "decode_tokens", "rounds", "threads")
"""Settings that the report names."""
Progress = Callable[[int, int, str], object]


@frozen(kw_only=True)
class _Opened:
    name: str
    footprint: Footprint
    runtime: Runtime
    times: list[tuple[float, float]] = Factory(list)


def evaluate(evaluation: Evaluation, *, progress: Progress | None = None) -> Report:
    """Measure every folder in its runtime, the baseline first.

    Args:
        evaluation: what is measured.
        progress: called with how many rows are read, in how many all folders come to, and with
            the folder's name and runtime.

    Raises:
        ExportError: a folder cannot be read, or its runtime is not installed.
        ConfigError: the dataset or a folder has another tokenizer than the baseline.
        DataError: the text cannot be used.
    """
    _check_tokenizers(evaluation)
    text = held_out(
        evaluation.dataset,
        sequence_length=evaluation.sequence_length,
        count=evaluation.sequences,
        chat=evaluation.baseline,
    )
    named = _folders(evaluation)
    for _, found in named:
        _check(found, text["tokens"], evaluation)
    with _threads(evaluation.threads):
        opened = [
            _Opened(
                name=name,
                footprint=found,
                runtime=open_runtime(found.folder, found.target, threads=evaluation.threads),
            )
            for name, found in named
        ]
        values = [
            _perplexity(one, text, _share(progress, one, i, len(opened)))
            for i, one in enumerate(opened)
        ]
        _time(opened, text["tokens"], evaluation)
    return Report(
        **{name: getattr(evaluation, name) for name in REPORTED},
        held_out_tokens=int((text["targets"] >= 0).sum()),
        results=tuple(
            _result(one, opened[0], value, evaluation)
            for one, value in zip(opened, values, strict=True)
        ),
    )


def _check_tokenizers(evaluation: Evaluation) -> None:
    """Refuse folders that would read the dataset's token ids as another text."""
    dataset = Path(evaluation.dataset)
    compared: dict[str, str | Path | None] = {
        "baseline": evaluation.baseline,
        "dataset": dataset if dataset.is_dir() else None,
    }
    for name, folders in evaluation.models.items():
        for folder in [folders] if isinstance(folders, str | Path) else folders:
            compared[f"{name!r} ({folder})"] = folder
    check_same_tokenizer(compared, remedy="compare folders of one tokenizer")


def _folders(evaluation: Evaluation) -> list[tuple[str, Footprint]]:
    """Return each folder's name and footprint, the baseline first."""
    named = [("float", footprint(evaluation.baseline))]
    for name, folders in evaluation.models.items():
        many = [folders] if isinstance(folders, str | Path) else folders
        named += [(name, footprint(folder)) for folder in many]
    if not named[0][1].is_plain:
        raise ConfigError(
            f"baseline: {evaluation.baseline} is a {named[0][1].target} model; give a plain one"
        )
    return named


def _check(found: Footprint, tokens: Tensor, evaluation: Evaluation) -> None:
    """Refuse a text that the model of a folder cannot read."""
    if found.vocabulary is not None and int(tokens.max()) >= found.vocabulary:
        raise DataError(
            f"{evaluation.dataset}: the text has token {int(tokens.max())}, and {found.folder} a"
            f" vocabulary of {found.vocabulary}; give text of the model's own tokenizer"
        )
    lengths = {
        "sequence_length": evaluation.sequence_length,
        "prefill_tokens and decode_tokens": evaluation.prefill_tokens + evaluation.decode_tokens,
    }
    for what, length in lengths.items():
        if found.positions is not None and length > found.positions:
            raise ConfigError(
                f"{found.folder} knows {found.positions} positions, fewer than the {length} of"
                f" {what}; ask for less"
            )


def _share(
    progress: Progress | None, one: _Opened, number: int, folders: int
) -> Callable[[int, int], object] | None:
    """Turn one folder's progress into a share of all folders' progress."""
    if progress is None:
        return None
    what = f"{one.name} in {one.runtime.name}"
    return lambda done, rows: progress(number * rows + done, folders * rows, what)


def _perplexity(
    one: _Opened,
    text: Mapping[str, Tensor],
    progress: Callable[[int, int], object] | None,
) -> float:
    try:
        return perplexity(one.runtime, text, progress=progress)
    except DataError as error:
        raise DataError(f"{one.footprint.folder}: {error}") from error


def _time(opened: Sequence[_Opened], tokens: Tensor, evaluation: Evaluation) -> None:
    """Time all folders in turn, after one round that does not count."""
    prompt = tokens.flatten()[: evaluation.prefill_tokens].tolist()
    if len(prompt) < evaluation.prefill_tokens:
        raise DataError(f"a prefill of {evaluation.prefill_tokens} tokens needs as many held out")
    for one in opened:
        one.runtime.decode(prompt, 2)
    for _ in range(evaluation.rounds):
        for one in opened:
            one.times.append(one.runtime.decode(prompt, evaluation.decode_tokens))


def _result(one: _Opened, base: _Opened, value: float, evaluation: Evaluation) -> Result:
    tokens = (evaluation.prefill_tokens, evaluation.decode_tokens)

    def speed(opened: _Opened, part: int) -> float:
        return tokens[part] / median(times[part] for times in opened.times)

    return Result(
        model=one.name,
        runtime=one.runtime.name,
        folder=str(one.footprint.folder),
        scheme=one.footprint.scheme,
        perplexity=value,
        size_bytes=one.footprint.size_bytes,
        bits_a_weight=one.footprint.bits_a_weight,
        prefill_tokens_per_s=speed(one, 0),
        decode_tokens_per_s=speed(one, 1),
        prefill_ratio=speed(one, 0) / speed(base, 0),
        decode_ratio=speed(one, 1) / speed(base, 1),
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
