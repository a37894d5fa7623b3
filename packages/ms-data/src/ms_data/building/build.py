"""Builds a folder of shards from a corpus.

A build works in `OUT.partial` and renames it at the end, so OUT is either complete or absent. Every
few seconds it syncs the shards and saves its progress in a journal. After a crash, the same command
resumes from the journal and produces identical bytes.
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

from ms_data.building.choice import make_encoder
from ms_data.building.encoders import TextEncoder
from ms_data.building.job import Job
from ms_data.building.journal import Recipe
from ms_data.building.media import with_media
from ms_data.building.record import Summary, finished_summary, save_record
from ms_data.chat.template import ChatTemplate
from ms_data.corpus.arguments import check_paths
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.files.durable import publish, sync_folder, writing
from ms_data.files.work_folder import JOURNAL, check_outside_corpus, resolve_output, work_folder
from ms_data.media.processor import Processor
from ms_data.passes.array_jobs import ArrayShard, remove_merged
from ms_data.passes.pool import worker_count
from ms_data.settings.arguments import check_counts, check_flags, check_share, check_texts
from ms_data.tokenization.tokenizer import Tokenizer
from ms_data.tokenization.word_encoder import WordsDifferError

_BUILD_FILES = re.compile(
    r"(shard-\d{5,}\.msd|index\.json|build\.json|tokenizer\.json|tokenizer_config\.json|"
    r"chat_template\.jinja|media\.json|journal\.msgpack)(\.partial)?"
)
"""Names of all files that a build writes."""


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

    Documents keep their order; each ends with an end-of-text token. The same call resumes a killed
    build.

    Args:
        corpus: files, folders or URLs, or `stdlib`; see `find_corpus`.
        tokenizer: a `tokenizer.json`, a tokenizer folder, or a loaded tokenizer.
        out: output folder; must be empty, or hold the same build.
        hold_out: fraction of documents in the split `held_out`, at least 0 and below 1, chosen by a
            hash of their text.
        shard_size_mib: a shard is closed at the first document end past this size.
        text_column: column or JSON key with the text of a row.
        skip_invalid: skip documents that are not valid text instead of stopping.
        chat: a Jinja file or a tokenizer folder; rows then have the formats of `read_conversation`.
        pairs: with `chat`, rows are preference pairs; see `read_pair`.
        allow_special: with `chat`, allow special tokens in message text.
        processor: with `chat`, processor for images and audio, or a folder that contains it.
        document_limit_mib: a longer document (uncompressed) stops the build.
        shard: `3/16` does the third of 16 parts of an array job; `merge/16` then creates OUT.
        workers: Ray cluster for tokenization, `ray` or `ray://HOST:PORT`. None: all local cores.
        on_progress: called after every batch with the corpus bytes done and the total.
        on_skip: called with location and reason for every skipped document.

    Raises:
        SettingError: an argument is invalid.
        CorpusError: the corpus is missing, empty, damaged or not text.
        TokenizerError: the tokenizer cannot be read.
        OutputError: `out` cannot be written, or holds something else.
    """
    check_paths(out, corpus=corpus, tokenizer=tokenizer, chat=chat, processor=processor)
    check_flags(skip_invalid=skip_invalid, pairs=pairs, allow_special=allow_special)
    check_texts(text_column=text_column, shard=shard, workers=workers)
    text_encoder = make_encoder(tokenizer, chat, pairs=pairs, allow_special=allow_special)
    encoder = with_media(text_encoder, processor, corpus)
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=skip_invalid,
        parse=encoder.parser,
        document_limit_mib=document_limit_mib,
    )
    recipe = _recipe(encoder, source, hold_out, shard_size_mib)
    shard_and_cluster = ArrayShard.parse(shard, out, corpus), _cluster_address(workers)
    return _run_or_reuse(
        Job(source, encoder, recipe, on_progress, on_skip, *shard_and_cluster), corpus, out
    )


def _cluster_address(workers: str | None) -> str:
    """Return the address of the Ray cluster; empty for local tokenization."""
    return "" if workers is None else str(worker_count(workers))


def _run_or_reuse(job: Job, corpus: CorpusName, out: str | Path) -> Summary:
    """Run the build, or its part of an array job, unless it is already done."""
    with writing(Path(out)):
        folder = Path(os.path.realpath(out))
        if (finished := finished_summary(folder, job.recipe, job.source, out)) is not None:
            return remove_merged(job.shard, finished)
    if job.shard is not None and job.shard.number:
        return _run_with_fallback(job, Job.run_shard, job.shard.remove_partial)
    return remove_merged(job.shard, _publish(job, corpus, out))


def _run_with_fallback(
    job: Job, run: Callable[[Job], Summary], discard: Callable[[], None]
) -> Summary:
    """Run a job; restart it with the `tokenizers` library if the fast encoder disagrees with it."""
    try:
        return run(job)
    except WordsDifferError as error:
        discard()  # earlier output may be wrong as well
        return run(evolve(job, encoder=job.encoder.with_library(str(error))))


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
    """Run a job in `OUT.partial`, then rename the folder to `out`."""
    folder = resolve_output(out)
    for path in [corpus] if isinstance(corpus, str | Path) else corpus:
        check_outside_corpus(folder, path)
    partial = folder.with_name(folder.name + ".partial")
    with work_folder(partial, _BUILD_FILES):
        # Without a journal, the next attempt starts from the beginning.
        journal = partial / JOURNAL
        summary = _run_with_fallback(
            job, lambda attempt: attempt.run(partial), lambda: journal.unlink(missing_ok=True)
        )
        save_record(partial, job.recipe, job.source, summary)
        (partial / JOURNAL).unlink(missing_ok=True)
        sync_folder(partial)
        publish(partial, folder)
    return msgspec.structs.replace(summary, folder=str(out))
