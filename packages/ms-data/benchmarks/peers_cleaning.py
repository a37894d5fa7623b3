"""Verdicts and speed of the published rules beside datatrove's, document by document.

    nox -s "peers(ms-data)"        or    python benchmarks/peers_cleaning.py [--corpus LINES]

Each rule judges every document, as it came in, in both libraries: whether it is kept, by which
measure it is dropped, and what C4 leaves of it. Both count the words of spaCy's English tokenizer,
which is datatrove's. They take turns by the document, in one process; times are CPU seconds, of
the part that a batch of a pipeline runs: words and rules.
"""

import argparse
import ast
import json
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4ParagraphFilter,
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)

from ms_data.cleaning.rule import Change, Drop, Rule
from ms_data.cleaning.rules.c4_paragraphs import C4Paragraphs
from ms_data.cleaning.rules.c4_quality import C4Quality
from ms_data.cleaning.rules.fineweb_quality import FineWebQuality
from ms_data.cleaning.rules.gopher_quality import GopherQuality
from ms_data.cleaning.rules.gopher_repetition import GopherRepetition
from ms_data.cleaning.text import Text
from ms_data.cleaning.words import splitter

MEASURES = {
    "gopher_short_doc": "min_words",
    "gopher_long_doc": "max_words",
    "gopher_below_avg_threshold": "min_mean_word_length",
    "gopher_above_avg_threshold": "max_mean_word_length",
    "gopher_too_many_hashes": "max_hashes_a_word",
    "gopher_too_many_ellipsis": "max_ellipses_a_word",
    "gopher_too_many_bullets": "max_bullet_lines",
    "gopher_too_many_end_ellipsis": "max_ellipsis_lines",
    "gopher_below_alpha_threshold": "min_alphabetic_words",
    "gopher_enough_stop_words": "min_stop_words",
    "dup_para_frac": "max_repeated_paragraphs",
    "dup_para_char_frac": "max_repeated_paragraph_characters",
    "dup_line_frac": "max_repeated_lines",
    "dup_line_char_frac": "max_repeated_line_characters",
    **{f"top_{n}_gram": "max_top_ngrams" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": "max_repeated_ngrams" for n in range(5, 11)},
    "empty": "min_ended_lines",
    "line_punct_ratio": "min_ended_lines",
    "short_line_ratio": "max_short_lines",
    "char_dup_ratio": "max_repeated_line_characters",
    "list_ratio": "max_lines_a_word",
    "lorem_ipsum": "lorem_ipsum",
    "curly_bracket": "curly_brackets",
    "too_few_sentences": "min_sentences",
    "< 3 paragraphs": "min_long_lines",
}
"""What datatrove calls a reason, and what we do."""

PAIRS: list[tuple[Rule, Any]] = [
    (GopherRepetition(), GopherRepetitionFilter()),
    (GopherQuality(), GopherQualityFilter()),
    (FineWebQuality(), FineWebQualityFilter()),
    (C4Paragraphs(), C4ParagraphFilter()),
    (C4Quality(), C4QualityFilter()),
]


def docstrings() -> Iterator[str]:
    """The documentation of the standard library, a docstring a document."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def documents(corpus: Path | None, most: int, characters: int) -> list[str]:
    """The documents to compare on, spread over the corpus."""
    if corpus is None:
        found = list(docstrings())
    else:
        with corpus.open() as lines:
            found = [json.loads(line)["text"] for line in lines]
    found = [text for text in found if text.strip() and len(text) <= characters]
    step = max(1, len(found) // most)
    return found[::step][:most]


def theirs(filter_: Any, text: str) -> tuple[str, str]:
    """What datatrove makes of a document: why it is dropped, or what is left."""
    document = Document(text=text, id="")
    found = filter_.filter(document)
    if found is True:
        return "", document.text
    return MEASURES[found[1]], ""


def ours(rule: Rule, text: Text) -> tuple[str, str]:
    """What we make of it."""
    found = rule.apply(text)
    if isinstance(found, Drop):
        return found.setting, ""
    return "", found.text if isinstance(found, Change) else text.text


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="JSON Lines with a text a line")
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--characters", type=int, default=100_000, help="longest document")
    parser.add_argument("--words", choices=["spacy", "plain"], default="spacy")
    options = parser.parse_args()
    split = splitter(options.words)
    texts = documents(options.corpus, options.documents, options.characters)
    seconds: Counter[str] = Counter()
    different: Counter[str] = Counter()
    other_reason: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    examples: list[Any] = []
    for text in texts:
        body = Text(text, split)
        for rule, filter_ in PAIRS:
            began = time.process_time()
            one = ours(rule, body)
            between = time.process_time()
            other = theirs(filter_, text)
            ended = time.process_time()
            seconds["ms-data"] += between - began
            seconds["datatrove"] += ended - between
            kept[rule.name] += not one[0]
            if bool(one[0]) != bool(other[0]):
                different[rule.name] += 1
                examples.append((rule.name, one[0], other[0], text[:60]))
            elif one != other:
                other_reason[rule.name] += 1
                examples.append((rule.name, one[0], other[0], text[:60]))
    size = sum(len(text.encode()) for text in texts) / 1e6
    figures = {
        "documents": len(texts),
        "MB": round(size, 1),
        "words": options.words,
        "kept": dict(kept),
        "kept by one alone": {rule.name: different[rule.name] for rule, _ in PAIRS},
        "the same verdict by another measure or with another text": {
            rule.name: other_reason[rule.name] for rule, _ in PAIRS
        },
        "MB a CPU s": {name: round(size / spent, 2) for name, spent in seconds.items()},
        "faster by": round(seconds["datatrove"] / seconds["ms-data"], 1),
        "first differences": examples[:8],
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
