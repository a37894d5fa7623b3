"""Results of an evaluation: one per folder and runtime."""

import math
from collections import Counter

import msgspec

from ms_compress.figures import ratio


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one exported folder in its runtime."""

    model: str
    """Name of the method, such as `QAT int4`."""
    runtime: str
    folder: str = ""
    """Path of the folder."""
    scheme: str
    """Storage format, such as `4-bit g32`; `float32` for a plain model."""
    perplexity: float
    """exp of the mean loss per held-out token, computed by the runtime."""
    size_bytes: int
    """Total size of the weight files."""
    bits_a_weight: float
    """Total size in bits divided by the number of weights."""
    prefill_tokens_per_s: float
    """Prompt tokens divided by the median prefill time over all rounds, for one row."""
    decode_tokens_per_s: float
    """Decoded tokens divided by the median decode time over all rounds, for one row."""
    prefill_ratio: float
    """`prefill_tokens_per_s` divided by the baseline's; above 1 is faster."""
    decode_ratio: float
    """`decode_tokens_per_s` divided by the baseline's."""

    def __post_init__(self) -> None:
        for name in ("perplexity", "bits_a_weight", "prefill_ratio", "decode_ratio"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"{self.model}: {name} is NaN")

    @property
    def slower(self) -> tuple[str, ...]:
        """Speeds below the baseline's: `prefill`, `decode`, both or neither."""
        ratios = {"prefill": self.prefill_ratio, "decode": self.decode_ratio}
        return tuple(name for name, value in ratios.items() if value < 1)


def _short_name(result: Result, name: str, counts: Counter[tuple[str, str]]) -> str:
    """Return "model in runtime" if that is unique, else the full name."""
    return (
        name if counts[result.model, result.runtime] > 1 else f"{result.model} in {result.runtime}"
    )


class Report(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="ms-compress-report-1",
):
    """All results of an evaluation, the baseline's first."""

    title: str
    held_out_tokens: int
    """Number of tokens in the perplexity."""
    sequence_length: int
    prefill_tokens: int
    decode_tokens: int
    rounds: int
    threads: int
    results: tuple[Result, ...]

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError("a report has at least the baseline's result")

    @property
    def baseline(self) -> Result:
        """The result that others are compared with."""
        return self.results[0]

    def names(self) -> list[str]:
        """Return a unique name for each result.

        A name has the model and runtime, and if needed the scheme, the folder and the index.
        """
        names = [f"{result.model} · {result.runtime}" for result in self.results]
        for attribute in ("scheme", "folder"):
            counts = Counter(names)
            names = [
                f"{name} · {getattr(result, attribute)}" if counts[name] > 1 else name
                for name, result in zip(names, self.results, strict=True)
            ]
        counts = Counter(names)
        return [f"{name} · {i}" if counts[name] > 1 else name for i, name in enumerate(names)]

    def warnings(self) -> list[str]:
        """Return one line for each result that is slower than the baseline."""
        base = self.baseline
        lines = []
        counts = Counter((result.model, result.runtime) for result in self.results)
        for result, name in zip(self.results[1:], self.names()[1:], strict=True):
            if result.slower:
                parts = [
                    f"{speed} {ratio(getattr(result, speed + '_ratio'))}x"
                    for speed in result.slower
                ]
                lines.append(
                    f"{_short_name(result, name, counts)} is slower than {base.model} in"
                    f" {base.runtime}: {' and '.join(parts)} its speed"
                )
        return lines
