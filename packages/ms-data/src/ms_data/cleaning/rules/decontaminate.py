"""Drops documents that hold parts of benchmark texts."""

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
from ms_data.settings import a_path, text, whole

_HASHES = WordHashCache()


@frozen(kw_only=True)
class Decontaminate(Rule):
    """Drops what shares 13 words in a row with a benchmark (Brown et al. 2020, appendix C)."""

    name = "decontaminate"

    benchmarks: str = field(metadata={"example": "benchmarks.jsonl"}, validator=a_path())
    """File or folder of the benchmarks' texts, anything that a corpus may be."""
    text_column: str = field(default="text", validator=text())
    """The member or column of a row that holds the text."""
    ngram_words: int = field(default=13, validator=whole(most=100))
    """Words in a row that decide; case and signs do not count, a Chinese character is a word."""
    min_words: int = field(default=8, validator=whole(most=100))
    """A benchmark text of fewer words than n-grams have is looked for whole, if it has these."""

    def check(self) -> None:
        """Read the benchmarks."""
        super().check()
        if not self._windows():
            raise SettingError(
                f"{self.benchmarks} holds no text of {self.min_words} words; give others, or lower "
                "min_words of decontaminate"
            )

    def identity(self) -> str:
        """Return the n-grams of the benchmarks."""
        parts = [hashes.tobytes() for _, hashes in sorted(self._windows().items())]
        return f"{super().identity()} {xxhash.xxh3_128_hexdigest(b'|'.join(parts))}".strip()

    def apply(self, text: Text, /) -> Outcome:
        """Drop a document with one of the n-grams."""
        words = _plain(text.text)
        hashes = _HASHES(words)
        for size, known in self._windows().items():
            windows = window_hashes(hashes, size)
            at = np.minimum(np.searchsorted(known, windows), len(known) - 1)
            found = np.flatnonzero(known[at] == windows)
            if len(found):
                start = int(found[0])
                return Drop("benchmarks", " ".join(words[start : start + size]), size)
        return None

    def _windows(self) -> dict[int, NDArray[np.uint64]]:
        return _index(
            self.benchmarks,
            self.text_column,
            self.ngram_words,
            min(self.min_words, self.ngram_words),
        )


def _plain(text: str) -> list[str]:
    return [word for word in plain_words(text.lower()) if word[0].isalnum()]


@cache
def _index(
    benchmarks: str, text_column: str, size: int, least: int
) -> dict[int, NDArray[np.uint64]]:
    """Return the hashes of all n-grams, sorted, by how many words they have."""
    found: dict[int, list[NDArray[np.uint64]]] = {}
    for document in find_corpus(
        Path(benchmarks), text_column=text_column, skip_hint=""
    ).documents():
        hashes = _HASHES(_plain(document.text))
        if len(hashes) >= least:
            window = min(size, len(hashes))
            found.setdefault(window, []).append(window_hashes(hashes, window))
    return {window: np.unique(np.concatenate(parts)) for window, parts in found.items()}


RULE = Decontaminate
