"""Cleans a corpus: rules keep, change or drop documents, and a ledger records every outcome."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ms_data.arguments import check_callable
from ms_data.cleaning.apply import CleaningSetup
from ms_data.cleaning.near_images import near_rows
from ms_data.cleaning.rows import RowRule, row_json
from ms_data.cleaning.rule_file import Rules, RuleSet, read_rules
from ms_data.cleaning.words import splitter
from ms_data.corpus.arguments import check_paths
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.engine.array_jobs import ArrayShard
from ms_data.engine.pools import worker_count
from ms_data.errors import SettingError
from ms_data.ledger.output import WITHOUT_STRICT, ledger_run, reading_recipe
from ms_data.ledger.record import LedgerSummary
from ms_data.settings.arguments import check_flags


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
    """Clean a corpus with rules, and write the kept documents and a ledger.

    Documents keep their order; the output does not depend on `workers`. The same call resumes an
    interrupted run.

    Args:
        corpus: files, folders or URLs of text and tables, or `stdlib`; see `find_corpus`.
        rules: a rule file (`ms-data init clean` writes one), its tables, or the rules in order.
        out: output folder with `documents`, which `build` reads, `ledger` and `ledger.json`.
        workers: number of processes, or a Ray cluster, `ray` or `ray://HOST:PORT`. None: one
            process per core.
        shard_size_mib: approximate maximum size of an output file, compressed.
        text_column: column or JSON key with the text of a row.
        strict: stop at an unreadable document instead of reporting and skipping it.
        document_limit_mib: a longer document (uncompressed) counts as unreadable.
        shard: `3/16` does the third of 16 parts of an array job; `merge/16` then creates OUT.
        on_progress: called after every batch with the corpus bytes done and the total.
        on_quarantine: called with location and reason for every unreadable document.

    Raises:
        SettingError: an argument or a rule is invalid, or needs a library that is not installed.
        CorpusError: the corpus is missing, empty or damaged, or with `strict` not text.
        OutputError: `out` cannot be written, or holds something else.
    """
    check_callable("on_progress", on_progress, error=SettingError)
    check_callable("on_quarantine", on_quarantine, error=SettingError)
    check_flags(strict=strict)
    check_paths(out, corpus=corpus, rules=rules)
    rule_set = _check_rules(read_rules(rules))
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=not strict,
        parse=row_json if rule_set.for_rows else None,
        columns=True,
        document_limit_mib=document_limit_mib,
        skip_hint=WITHOUT_STRICT,
    )
    recipe = {**_recipe(rule_set), **reading_recipe(source, shard_size_mib)}
    processes = worker_count(workers)
    job = None if shard is None else ArrayShard.parse(shard, out, corpus)
    run = ledger_run(
        "clean",
        corpus,
        source,
        recipe=recipe,
        function="ms_data.cleaning.apply:prepare",
        setup=lambda folder: _worker_setup(rule_set, source),
        workers=processes,
        shard_size_mib=shard_size_mib,
        on_progress=on_progress,
        on_skip=on_quarantine,
        shard=job,
    )
    summary = run.publish(out)
    if job is not None:
        job.remove_merged()
    return summary


def _worker_setup(rule_set: RuleSet, source: Corpus) -> bytes:
    """Return the settings of workers, after the search for near-duplicates that a rule may need."""
    near_duplicates: Mapping[int, int] = {}
    rules = [rule for rule in rule_set.rules if isinstance(rule, RowRule)]
    for index, rule in enumerate(rules):
        bits = getattr(rule, "near_bits", None)
        if bits is not None:
            # `near_rows` reads the images through the first rule.
            ordered = [rule, *rules[:index], *rules[index + 1 :]]
            near_duplicates = near_rows(source, ordered, bits, splitter(rule_set.words))
    return msgspec.msgpack.encode(
        CleaningSetup(rule_set.words, rule_set.settings(), dict(near_duplicates))
    )


def _check_rules(rule_set: RuleSet) -> RuleSet:
    splitter(rule_set.words)
    for rule in rule_set.rules:
        rule.check()
    return rule_set


def _recipe(rule_set: RuleSet) -> dict[str, object]:
    """Return the rule settings and library versions that determine the output."""
    settings = rule_set.settings()
    return {
        "words": rule_set.words,
        "rules": [name for name, _ in settings],
        # Numbered, as the order matters and a rule may be applied twice.
        **{f"rule {n} ({name})": _plain(values) for n, (name, values) in enumerate(settings, 1)},
        **{
            f"{rule.name}: made with": using
            for rule in rule_set.rules
            if (using := rule.identity())
        },
    }


def _plain(settings: dict[str, object]) -> object:
    """Convert settings to the values that JSON returns for them, for comparison with saved ones."""
    return msgspec.json.decode(msgspec.json.encode(settings))
