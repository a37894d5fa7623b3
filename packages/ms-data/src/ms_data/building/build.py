"""Builds a folder of shards from a corpus.

A build works in a folder beside the one asked for, `OUT.partial`, and renames it at the end, so
that OUT is whole or not there. Every few seconds it syncs its shards and notes how far it is;
the same command after a crash goes on from that note and ends in the same bytes.
"""

import operator
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import tokenizers
import zstandard
from attrs import evolve

from ms_data.building.choice import encoder_for
from ms_data.building.encoders import TextEncoder
from ms_data.building.job import Job
from ms_data.building.journal import Recipe
from ms_data.building.media import with_media
from ms_data.building.record import Summary, save_record, summary_of
from ms_data.chat.template import ChatTemplate
from ms_data.corpus.arguments import check_paths
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.files.durable import publish, sync_folder, writing
from ms_data.files.work_folder import JOURNAL, free_place, refuse_inside, work_folder
from ms_data.media.processor import Processor
from ms_data.passes.array_jobs import ArrayShard, merged
from ms_data.passes.pool import worker_count
from ms_data.settings.arguments import check_counts, check_flags, check_share, check_texts
from ms_data.tokenization.tokenizer import Tokenizer
from ms_data.tokenization.word_encoder import WordsDifferError

_OURS = re.compile(
    r"(shard-\d{5,}\.msd|index\.json|build\.json|tokenizer\.json|tokenizer_config\.json|"
    r"chat_template\.jinja|media\.json|journal\.msgpack)(\.partial)?"
)
"""The names of all that a build writes."""


def build(
    corpus: CorpusName,
    *,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    hold_out: float = 0.0,
    shard_size_mib: int = 64,
    text_column: str = "text",
    skip_invalid: bool = False,
    chat: str | Path | ChatTemplate | None = None,
    pairs: bool = False,
    allow_special: bool = False,
    processor: str | Path | Processor | None = None,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
    shard: str | None = None,
    workers: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_skip: Callable[[str], None] = lambda reason: None,
) -> Summary:
    """Tokenize a corpus into a folder of checked, compressed shards.

    Documents keep their order, each with an end of text. The same call goes on with a killed build.

    Args:
        corpus: files, folders or addresses, or `stdlib`; see `find_corpus`.
        tokenizer: a `tokenizer.json`, a tokenizer's folder or a loaded one.
        out: the folder to make; it must not hold anything but the same build.
        hold_out: share of documents, 0 ≤ share < 1, for the split `held_out`; their text decides.
        shard_size_mib: a shard is closed at the first document end past this size.
        text_column: the member or column of a row with the text.
        skip_invalid: leave out what is not valid text instead of stopping.
        chat: a Jinja file or a tokenizer's folder; rows are what `read_conversation` reads.
        pairs: with `chat`, the rows are preference pairs; see `read_pair`.
        allow_special: with `chat`, messages may spell special tokens.
        processor: with `chat`, for messages with pictures and sound; or a folder that holds it.
        document_limit_mib: a longer document, once unpacked, stops the build.
        shard: `3/16` does the third part for an array of 16 jobs; `merge/16` makes OUT of all.
        workers: the Ray cluster that tokenizes: `ray`, or `ray://HOST:PORT`; None: all cores.
        on_progress: called with the bytes of the corpus that are done, and all, after each batch.
        on_skip: called with the place and fault of each document that is left out.

    Raises:
        SettingError: an argument is out of range.
        CorpusError: the corpus is missing, empty, damaged or not text.
        TokenizerError: the tokenizer cannot be read.
        OutputError: `out` cannot be written, or holds something else.
    """
    check_paths(out, corpus=corpus, tokenizer=tokenizer, chat=chat, processor=processor)
    check_flags(skip_invalid=skip_invalid, pairs=pairs, allow_special=allow_special)
    check_texts(text_column=text_column, shard=shard, workers=workers)
    of_text = encoder_for(tokenizer, chat, pairs=pairs, allow_special=allow_special)
    encoder = with_media(of_text, processor, corpus)
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=skip_invalid,
        parse=encoder.parser,
        document_limit_mib=document_limit_mib,
    )
    recipe = _recipe(encoder, source, hold_out, shard_size_mib)
    where = ArrayShard.parse(shard, out, corpus), _cluster(workers)
    return _perform(Job(source, encoder, recipe, on_progress, on_skip, *where), corpus, out)


def _cluster(workers: str | None) -> str:
    """Return the address of the cluster that tokenizes; empty for none."""
    return "" if workers is None else str(worker_count(workers))


def _perform(job: Job, corpus: CorpusName, out: str | Path) -> Summary:
    """Run the build, or its part in an array of jobs, unless it is done already."""
    with writing(Path(out)):
        folder = Path(os.path.realpath(out))
        if (done := summary_of(folder, job.recipe, job.source, out)) is not None:
            return merged(job.shard, done)
    if job.shard is not None and job.shard.number:
        return _proved(job, Job.run_shard, job.shard.remove_partial)
    return merged(job.shard, _publish(job, corpus, out))


def _proved(job: Job, run: Callable[[Job], Summary], start_anew: Callable[[], None]) -> Summary:
    """Run a job; if its word encoder differs from the library, begin again with the library."""
    try:
        return run(job)
    except WordsDifferError as error:
        start_anew()  # what is written may be wrong as well
        return run(evolve(job, encoder=job.encoder.by_library(str(error))))


def _recipe(encoder: TextEncoder, source: Corpus, hold_out: float, shard_size_mib: int) -> Recipe:
    check_counts(shard_size_mib=shard_size_mib)
    return Recipe(
        tokenizer=encoder.tokenizer.digest,
        end_of_text=encoder.tokenizer.end_of_text,
        hold_out=check_share("hold_out", hold_out),
        shard_size_bytes=operator.index(shard_size_mib) << 20,
        text_column=source.options.text_column,
        libraries=f"tokenizers {tokenizers.__version__}, zstandard {zstandard.__version__}",
        chat=encoder.digest,
        skip_invalid=source.options.skip_invalid,
        document_limit_mib=source.options.document_limit_mib,
    )


def _publish(job: Job, corpus: CorpusName, out: str | Path) -> Summary:
    """Run a job in a folder beside `out`, which then takes its name."""
    folder = free_place(out)
    for one in [corpus] if isinstance(corpus, str | Path) else corpus:
        refuse_inside(folder, one)
    aside = folder.with_name(folder.name + ".partial")
    with work_folder(aside, _OURS):
        journal = aside / JOURNAL
        summary = _proved(job, lambda one: one.run(aside), lambda: journal.unlink(missing_ok=True))
        save_record(aside, job.recipe, job.source, summary)
        (aside / JOURNAL).unlink(missing_ok=True)
        sync_folder(aside)
        publish(aside, folder)
    return msgspec.structs.replace(summary, folder=str(out))
