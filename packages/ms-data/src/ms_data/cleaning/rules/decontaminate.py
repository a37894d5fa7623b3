"""Drops documents that contain parts of benchmark texts."""

from functools import cache
from pathlib import Path

import numpy as np
import xxhash
from attrs import field, frozen
from numpy.typing import NDArray

from ms_data.cleaning.ngrams import WordHashCache, window_hashes
from ms_data.cleaning.rule import Drop, Outcome, Rule
from ms_data.cleaning.text import Text
from ms_data.cleaning.words import plain_words
from ms_data.corpus.find import find_corpus
from ms_data.errors import SettingError
from ms_data.settings import integer, text, valid_path

_HASHES = WordHashCache()


@frozen(kw_only=True)
class Decontaminate(Rule):
    """Drops texts with 13 consecutive words of a benchmark (Brown et al. 2020, appendix C)."""

    name = "decontaminate"

    benchmarks: str = field(metadata={"example": "benchmarks.jsonl"}, validator=valid_path())
    """File or folder with the benchmark texts, in any corpus format."""
    text_column: str = field(default="text", validator=text())
    """Column or JSON key with the text of a row."""
    ngram_words: int = field(default=13, validator=integer(maximum=100))
    """Words per n-gram; case and punctuation are ignored, and a Chinese character is a word."""
    min_words: int = field(default=8, validator=integer(maximum=100))
    """A benchmark text with fewer words than an n-gram, but at least this many, is one n-gram."""

    def check(self) -> None:
        """Read the benchmarks."""
        super().check()
        if not self._benchmark_hashes():
            raise SettingError(
                f"{self.benchmarks} holds no text of {self.min_words} words; use other benchmarks, "
                "or lower min_words of decontaminate"
            )

    def identity(self) -> str:
        """Return a hash of the benchmark n-grams."""
        # With other benchmarks, an interrupted run must not be resumed.
        parts = [hashes.tobytes() for _, hashes in sorted(self._benchmark_hashes().items())]
        return f"{super().identity()} {xxhash.xxh3_128_hexdigest(b'|'.join(parts))}".strip()

    def apply(self, text: Text, /) -> Outcome:
        """Drop a document that shares an n-gram with a benchmark."""
        words = _normalized_words(text.text)
        hashes = _HASHES(words)
        for size, benchmark_hashes in self._benchmark_hashes().items():
            windows = window_hashes(hashes, size)
            # Binary search of every window among the sorted hashes, (windows,).
            nearest = np.minimum(
                np.searchsorted(benchmark_hashes, windows), len(benchmark_hashes) - 1
            )
            matches = np.flatnonzero(benchmark_hashes[nearest] == windows)
            if len(matches):
                start = int(matches[0])
                return Drop("benchmarks", " ".join(words[start : start + size]), size)
        return None

    def _benchmark_hashes(self) -> dict[int, NDArray[np.uint64]]:
        return _index(
            self.benchmarks,
            self.text_column,
            self.ngram_words,
            min(self.min_words, self.ngram_words),
        )


def _normalized_words(text: str) -> list[str]:
    return [word for word in plain_words(text.lower()) if word[0].isalnum()]


@cache
def _index(
    benchmarks: str, text_column: str, size: int, min_words: int
) -> dict[int, NDArray[np.uint64]]:
    """Return the sorted hashes of all n-grams, by number of words."""
    parts_by_size: dict[int, list[NDArray[np.uint64]]] = {}
    for document in find_corpus(
        Path(benchmarks), text_column=text_column, skip_hint=""
    ).documents():
        hashes = _HASHES(_normalized_words(document.text))
        if len(hashes) >= min_words:
            window = min(size, len(hashes))  # a short benchmark text is one n-gram
            parts_by_size.setdefault(window, []).append(window_hashes(hashes, window))
    return {window: np.unique(np.concatenate(parts)) for window, parts in parts_by_size.items()}


RULE = Decontaminate
