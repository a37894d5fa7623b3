"""The results of an evaluation: one for each folder in its runtime."""

import math
from collections import Counter

import msgspec

from ms_compress.figures import ratio


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One exported folder, as its runtime computes it."""

    model: str
    """How it was made, such as `QAT int4`."""
    runtime: str
    folder: str = ""
    """Where it lies."""
    scheme: str
    """The scheme, such as `4-bit g32`; `float32` for a plain model."""
    perplexity: float
    """exp of the mean loss of a held-out token, as the runtime computes it."""
    size_bytes: int
    """Bytes of the files that hold weights."""
    bits_a_weight: float
    """All those bytes, in bits, over the number of the model's weights."""
    prefill_tokens_per_s: float
    """Prompt tokens over the median prefill time of all rounds, one row."""
    decode_tokens_per_s: float
    """Generated tokens over the median time of all rounds, one row, one token after another."""
    prefill_ratio: float
    """`prefill_tokens_per_s` over the baseline's; above 1 is faster."""
    decode_ratio: float
    """`decode_tokens_per_s` over the baseline's."""

    def __post_init__(self) -> None:
        for name in ("perplexity", "bits_a_weight", "prefill_ratio", "decode_ratio"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"{self.model}: {name} is NaN")

    @property
    def slower(self) -> tuple[str, ...]:
        """What is slower than the baseline: `prefill`, `decode`, both or nothing."""
        ratios = {"prefill": self.prefill_ratio, "decode": self.decode_ratio}
        return tuple(name for name, value in ratios.items() if value < 1)


def _of(one: Result, name: str, alike: Counter[tuple[str, str]]) -> str:
    return name if alike[one.model, one.runtime] > 1 else f"{one.model} in {one.runtime}"


class Report(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="ms-compress-report-1",
):
    """All results of one evaluation, the baseline's first."""

    title: str
    held_out_tokens: int
    """Tokens that the perplexity is taken over."""
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
        """What speeds and perplexities are compared with."""
        return self.results[0]

    def names(self) -> list[str]:
        """Return a name for each result that no other has.

        That is how it was made, where it runs, and as needed its scheme, its folder and its place
        in the list.
        """
        found = [f"{one.model} · {one.runtime}" for one in self.results]
        for more in ("scheme", "folder"):
            alike = Counter(found)
            found = [
                f"{name} · {getattr(one, more)}" if alike[name] > 1 else name
                for name, one in zip(found, self.results, strict=True)
            ]
        alike = Counter(found)
        return [f"{name} · {i}" if alike[name] > 1 else name for i, name in enumerate(found)]

    def warnings(self) -> list[str]:
        """Return one line for each result that is slower than the baseline."""
        base = self.baseline
        lines = []
        names = Counter((one.model, one.runtime) for one in self.results)
        for one, name in zip(self.results[1:], self.names()[1:], strict=True):
            if one.slower:
                parts = [f"{name} {ratio(getattr(one, name + '_ratio'))}x" for name in one.slower]
                lines.append(
                    f"{_of(one, name, names)} is slower than {base.model} in {base.runtime}:"
                    f" {' and '.join(parts)} its speed"
                )
        return lines
