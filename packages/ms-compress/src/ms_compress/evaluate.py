"""What compression cost and gave, measured in the runtimes that people deploy on.

Perplexity is that of the runtime's own logits. Speeds are wall time of one row, in rounds that
alternate over all runtimes; a ratio is taken within a round, so a slow moment of the host slows
both of its sides.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from attrs import Attribute, Factory, field, frozen
from torch import Tensor

from ms_compress.corpus import rows
from ms_compress.errors import ConfigError, DataError
from ms_compress.footprint import Footprint, footprint
from ms_compress.perplexity import perplexity
from ms_compress.report import Report, Result
from ms_compress.runtimes import Runtime, open_runtime
from ms_compress.settings import text, whole

__all__ = ["Evaluation", "evaluate"]

Folders = str | Sequence[str]


def _models(instance: object, attribute: "Attribute[object]", value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{attribute.name} is {value!r}; give a table of folders by name")
    for name, folders in value.items():
        many = [folders] if isinstance(folders, str | Path) else folders
        if not isinstance(many, list | tuple) or not many:
            raise ConfigError(f"{attribute.name}: {name!r} is {folders!r}; give folders")


@frozen(kw_only=True)
class Evaluation:
    """What is measured, and on which text."""

    baseline: str = field(validator=text())
    """Folder of the plain model, which torch runs in float32."""
    models: Mapping[str, Folders] = field(validator=_models)
    """A folder, or several for several runtimes, by the name of how it was made."""
    data: str = field(validator=text())
    """Folder of ms-data's shards with a held-out split."""
    title: str = field(default="What compression costs and gives", validator=text())
    sequence_length: int = field(default=256, validator=whole())
    sequences: int = field(default=32, validator=whole())
    """Held-out rows that the perplexity is taken over."""
    prefill_tokens: int = field(default=128, validator=whole())
    decode_tokens: int = field(default=32, validator=whole())
    rounds: int = field(default=5, validator=whole())
    threads: int = field(default=1, validator=whole(most=1024))


@frozen(kw_only=True)
class _Opened:
    name: str
    facts: Footprint
    runtime: Runtime
    times: list[tuple[float, float]] = Factory(list)


def evaluate(evaluation: Evaluation) -> Report:
    """Measure every folder in its runtime, the baseline first.

    Raises:
        ExportError: a folder cannot be read, or its runtime is not installed.
        DataError: the text cannot be used.
    """
    held_out = rows(
        evaluation.data,
        split="held_out",
        sequence_length=evaluation.sequence_length,
        count=evaluation.sequences,
    )
    with _threads(evaluation.threads):
        opened = _open(evaluation)
        values = [perplexity(one.runtime, held_out) for one in opened]
        _time(opened, held_out["tokens"], evaluation)
    return Report(
        title=evaluation.title,
        held_out_tokens=int((held_out["targets"] >= 0).sum()),
        sequence_length=evaluation.sequence_length,
        prefill_tokens=evaluation.prefill_tokens,
        decode_tokens=evaluation.decode_tokens,
        rounds=evaluation.rounds,
        threads=evaluation.threads,
        results=tuple(
            _result(one, opened[0], value, evaluation)
            for one, value in zip(opened, values, strict=True)
        ),
    )


def _open(evaluation: Evaluation) -> list[_Opened]:
    named = [("float", evaluation.baseline)]
    for name, folders in evaluation.models.items():
        many = [folders] if isinstance(folders, str | Path) else folders
        named += [(name, str(folder)) for folder in many]
    facts = [footprint(folder) for _, folder in named]
    if facts[0].target != "float":
        raise ConfigError(
            f"baseline: {evaluation.baseline} is a {facts[0].target} model; give a plain one"
        )
    return [
        _Opened(
            name=name,
            facts=fact,
            runtime=open_runtime(Path(folder), fact.target, threads=evaluation.threads),
        )
        for (name, folder), fact in zip(named, facts, strict=True)
    ]


def _time(opened: Sequence[_Opened], tokens: Tensor, evaluation: Evaluation) -> None:
    """One round that does not count, then the rounds."""
    prompt = tokens.flatten()[: evaluation.prefill_tokens].tolist()
    if len(prompt) < evaluation.prefill_tokens:
        raise DataError(f"a prefill of {evaluation.prefill_tokens} tokens needs as many held out")
    for one in opened:
        one.runtime.decode(prompt, 2)
    for _ in range(evaluation.rounds):
        for one in opened:
            one.times.append(one.runtime.decode(prompt, evaluation.decode_tokens))


def _result(one: _Opened, base: _Opened, value: float, evaluation: Evaluation) -> Result:
    def speed(part: int, tokens: int) -> float:
        return tokens / median(times[part] for times in one.times)

    def ratio(part: int) -> float:
        return median(b[part] / a[part] for a, b in zip(one.times, base.times, strict=True))

    return Result(
        model=one.name,
        runtime=one.runtime.name,
        scheme=one.facts.scheme,
        perplexity=value,
        size_bytes=one.facts.size_bytes,
        bits_a_weight=one.facts.bits_a_weight,
        prefill_tokens_per_s=speed(0, evaluation.prefill_tokens),
        decode_tokens_per_s=speed(1, evaluation.decode_tokens),
        prefill_ratio=ratio(0),
        decode_ratio=ratio(1),
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
