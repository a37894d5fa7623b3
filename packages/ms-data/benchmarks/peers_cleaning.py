"""Decisions and speed of the published cleaning rules, compared with datatrove per document.

    nox -s "peers(ms-data)"        or    python benchmarks/peers_cleaning.py [--corpus LINES]

Every rule judges every original document in both libraries. Compared are whether it is kept, by
which measure it is dropped, and the text that C4 leaves. Both count the words of spaCy's English
tokenizer, datatrove's default. They alternate by document in one process. Times are CPU seconds of
the work of a pipeline batch: words and rules.
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
"""Maps datatrove's reasons to our setting names."""

PAIRS: list[tuple[Rule, Any]] = [
    (GopherRepetition(), GopherRepetitionFilter()),
    (GopherQuality(), GopherQualityFilter()),
    (FineWebQuality(), FineWebQualityFilter()),
    (C4Paragraphs(), C4ParagraphFilter()),
    (C4Quality(), C4QualityFilter()),
]


def stdlib_docstrings() -> Iterator[str]:
    """Yield the docstrings of the standard library, one per document."""
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


def load_documents(corpus: Path | None, limit: int, characters: int) -> list[str]:
    """Return the documents to compare, spread evenly over the corpus."""
    if corpus is None:
        texts = list(stdlib_docstrings())
    else:
        with corpus.open() as lines:
            texts = [json.loads(line)["text"] for line in lines]
    texts = [text for text in texts if text.strip() and len(text) <= characters]
    step = max(1, len(texts) // limit)
    return texts[::step][:limit]


def judge_with_datatrove(filter_: Any, text: str) -> tuple[str, str]:
    """Return the measure by which datatrove drops a document, or the text it keeps."""
    document = Document(text=text, id="")
    result = filter_.filter(document)
    if result is True:
        return "", document.text
    return MEASURES[result[1]], ""


def judge_with_ms_data(rule: Rule, text: Text) -> tuple[str, str]:
    """Return the setting by which ms-data drops a document, or the text it keeps."""
    outcome = rule.apply(text)
    if isinstance(outcome, Drop):
        return outcome.setting, ""
    return "", outcome.text if isinstance(outcome, Change) else text.text


def main() -> None:
    """Print all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="JSON Lines file with one text per line")
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--characters", type=int, default=100_000, help="longest document")
    parser.add_argument("--words", choices=["spacy", "plain"], default="spacy")
    options = parser.parse_args()
    split = splitter(options.words)
    texts = load_documents(options.corpus, options.documents, options.characters)
    seconds: Counter[str] = Counter()
    different: Counter[str] = Counter()
    other_reason: Counter[str] = Counter()
    kept_counts: Counter[str] = Counter()
    examples: list[Any] = []
    for text in texts:
        body = Text(text, split)
        for rule, filter_ in PAIRS:
            start = time.process_time()
            our_verdict = judge_with_ms_data(rule, body)
            middle = time.process_time()
            their_verdict = judge_with_datatrove(filter_, text)
            end = time.process_time()
            seconds["ms-data"] += middle - start
            seconds["datatrove"] += end - middle
            kept_counts[rule.name] += not our_verdict[0]
            if bool(our_verdict[0]) != bool(their_verdict[0]):
                different[rule.name] += 1
                examples.append((rule.name, our_verdict[0], their_verdict[0], text[:60]))
            elif our_verdict != their_verdict:
                other_reason[rule.name] += 1
                examples.append((rule.name, our_verdict[0], their_verdict[0], text[:60]))
    size = sum(len(text.encode()) for text in texts) / 1e6
    figures = {
        "documents": len(texts),
        "MB": round(size, 1),
        "words": options.words,
        "kept": dict(kept_counts),
        "kept by only one": {rule.name: different[rule.name] for rule, _ in PAIRS},
        "dropped by another measure or with different text": {
            rule.name: other_reason[rule.name] for rule, _ in PAIRS
        },
        "MB per CPU s": {name: round(size / cpu_s, 2) for name, cpu_s in seconds.items()},
        "faster by": round(seconds["datatrove"] / seconds["ms-data"], 1),
        "first differences": examples[:8],
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
