"""What counts as a duplicate, and which one is kept."""

from collections.abc import Sequence

from attrs import field, frozen

from ms_data.cleaning.rule import as_tuple, texts
from ms_data.settings import flag, one_of, whole


@frozen(kw_only=True)
class DedupOptions:
    """How duplicates are found, and which one of them is kept."""

    exact: bool = field(default=True, validator=flag)
    """Drop documents whose text is the same, character by character."""
    minhash: bool = field(default=True, validator=flag)
    """Drop documents that share most of their n-grams, by MinHash and bands."""
    bands: int = field(default=14, validator=whole(most=256))
    """Bands of a signature: two documents are alike if one of their bands is the same."""
    rows: int = field(default=8, validator=whole(most=64))
    """Hashes of a band: documents of Jaccard similarity s meet with 1 - (1 - s^rows)^bands."""
    ngram_words: int = field(default=5, validator=whole(most=100))
    """Words of an n-gram; case and signs do not count, a Chinese character is a word."""
    substring_words: int = field(default=0, validator=whole(least=0, most=10_000))
    """Cut rows of this many words that stood before out of documents; 0: leave them."""
    keep: str = field(default="first", validator=one_of("first", "longest", "priority"))
    """Which one is kept: the first, the longest, or the one of the first pattern that fits."""
    priority: Sequence[str] = field(default=(), converter=as_tuple, validator=texts)
    """Patterns of files by their names in the corpus, such as "wiki/*", the best first."""
