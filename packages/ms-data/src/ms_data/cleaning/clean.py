"""Cleans a corpus: rules keep, change or drop its documents, and a ledger says which."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ms_data.cleaning.apply import CleaningSetup
from ms_data.cleaning.near_pictures import near_rows
from ms_data.cleaning.rows import RowRule, row_json
from ms_data.cleaning.rule_file import Rules, RuleSet, read_rules
from ms_data.cleaning.words import splitter
from ms_data.corpus.arguments import check_paths
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.passes.array_jobs import ArrayShard, merged
from ms_data.passes.pool import worker_count
from ms_data.passes.record import LedgerSummary
from ms_data.passes.run import WITHOUT_STRICT, Pass, reading_recipe


def clean(
    corpus: CorpusName,
    rules: Rules,
    *,
    out: str | Path,
    workers: int | str | None = None,
    shard_size_mib: int = 64,
    text_column: str = "text",
    strict: bool = False,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    shard: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_quarantine: Callable[[str], None] = lambda reason: None,
) -> LedgerSummary:
    """Write the documents of a corpus that rules keep, as they change them, and a ledger.

    Documents keep their order; the bytes do not depend on `workers`. What was cut short goes on.

    Args:
        corpus: files, folders or addresses of text and tables, or `stdlib`; see `find_corpus`.
        rules: a file of rules (`ms-data init clean` writes one), its tables, or the rules in order.
        out: the folder to make: `documents`, which `build` reads, `ledger`, and `ledger.json`.
        workers: processes; None: one a core; or a Ray cluster: `ray`, or `ray://HOST:PORT`.
        shard_size_mib: a file is closed at the first MiB of text past this size, once packed.
        text_column: the member or column of a row that holds the text.
        strict: stop at a document that cannot be read instead of naming it and going on.
        document_limit_mib: a longer document, once unpacked, cannot be read.
        shard: `3/16` does the third part for an array of 16 jobs; `merge/16` makes OUT of all.
        on_progress: called with the bytes of the corpus that are done, and all, after each batch.
        on_quarantine: called with the place and fault of each document that cannot be read.

    Raises:
        SettingError: an argument or a rule cannot be used, or needs a library that is missing.
        CorpusError: the corpus is missing, empty or damaged, or with `strict` not text.
        OutputError: `out` cannot be written, or holds something else.
    """
    check_paths(out, corpus=corpus, rules=rules)
    chosen = _checked(read_rules(rules))
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=not strict,
        parse=row_json if chosen.of_rows else None,
        columns=True,
        document_limit_mib=document_limit_mib,
        skip_hint=WITHOUT_STRICT,
    )
    work = Pass(
        kind="clean",
        corpus=corpus,
        source=source,
        recipe={**_recipe(chosen), **reading_recipe(source, shard_size_mib)},
        work="ms_data.cleaning.apply:prepare",
        prepare=lambda folder: _setup(chosen, source),
        workers=worker_count(workers),
        shard_size_mib=shard_size_mib,
        on_progress=on_progress,
        on_quarantine=on_quarantine,
        shard=ArrayShard.parse(shard, out, corpus),
    )
    return merged(work.shard, work.publish(out))


def _setup(chosen: RuleSet, source: Corpus) -> bytes:
    """Return what processes need to apply the rules; look for near-duplicates first, if asked."""
    near: Mapping[int, int] = {}
    rules = [rule for rule in chosen.rules if isinstance(rule, RowRule)]
    for at, rule in enumerate(rules):
        bits = getattr(rule, "near_bits", None)
        if bits is not None:
            ordered = [rule, *rules[:at], *rules[at + 1 :]]
            near = near_rows(source, ordered, bits, splitter(chosen.words))
    return msgspec.msgpack.encode(CleaningSetup(chosen.words, chosen.settings(), dict(near)))


def _checked(chosen: RuleSet) -> RuleSet:
    splitter(chosen.words)
    for rule in chosen.rules:
        rule.check()
    return chosen


def _recipe(chosen: RuleSet) -> dict[str, object]:
    """Return what decides, of the rules, the bytes that are written."""
    settings = chosen.settings()
    return {
        "words": chosen.words,
        "rules": [name for name, _ in settings],
        **{f"rule {n} ({name})": _plain(one) for n, (name, one) in enumerate(settings, 1)},
        **{f"{rule.name}: made with": one for rule in chosen.rules if (one := rule.identity())},
    }


def _plain(settings: dict[str, object]) -> object:
    """Turn settings into what JSON gives back of them, so that they compare."""
    return msgspec.json.decode(msgspec.json.encode(settings))
