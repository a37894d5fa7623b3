"""Options of deduplication."""

from collections.abc import Sequence

from attrs import field, frozen

from ms_data.cleaning.rule import as_tuple, texts
from ms_data.errors import ConfigError
from ms_data.settings import flag, integer, one_of
from ms_data.used_settings import UsedIf, check_used


@frozen(kw_only=True)
class DedupOptions:
    """Criteria for duplicates, and for the document to keep."""

    exact: bool = field(default=True, validator=flag)
    """Drop documents with identical text."""
    minhash: bool = field(default=True, validator=flag)
    """Drop documents that share most n-grams, by MinHash LSH."""
    bands: int = field(default=14, validator=integer(maximum=256))
    """Bands per signature; documents with an equal band are near duplicates."""
    rows: int = field(default=8, validator=integer(maximum=64))
    """Hashes per band; documents of Jaccard similarity s match with probability 1 - (1 -
    s^rows)^bands."""
    ngram_words: int = field(default=5, validator=integer(maximum=100))
    """Words per n-gram; case and punctuation are ignored, and a Chinese character is a word."""
    substring_words: int = field(default=0, validator=integer(minimum=0, maximum=10_000))
    """Cut repeated spans of at least this many words; 0: off."""
    keep: str = field(default="first", validator=one_of("first", "longest", "priority"))
    """Document to keep: first, longest, or priority for the first matching pattern."""
    priority: Sequence[str] = field(default=(), converter=as_tuple, validator=texts)
    """File name patterns, highest priority first, such as "wiki/*"."""

    def __attrs_post_init__(self) -> None:
        rules = (
            UsedIf("bands rows ngram_words", "with minhash", lambda options: options.minhash),
            UsedIf("priority", "with keep='priority'", lambda options: options.keep == "priority"),
        )
        check_used(self, rules, error=ConfigError)
