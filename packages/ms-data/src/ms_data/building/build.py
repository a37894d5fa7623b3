"""Builds a folder of shards from a corpus: reads, tokenizes and writes, with exact resume."""

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import zstandard

from ms_data.arguments import check_callable
from ms_data.building.batch_encoding import WORK, EncodedDocs, encode_batches
from ms_data.building.encoders import ChatEncoder, TextEncoder
from ms_data.building.media import with_media
from ms_data.building.output import BUILD_FILES, BuildState, ShardOutput, Summary
from ms_data.chat.template import ChatTemplate
from ms_data.corpus.arguments import check_paths
from ms_data.corpus.corpus import Corpus
from ms_data.corpus.find import CorpusName, find_corpus
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.disk.format import DocumentKind
from ms_data.engine.array_jobs import ArrayShard
from ms_data.engine.pools import worker_count
from ms_data.engine.run import Journal, Run
from ms_data.errors import SettingError
from ms_data.media.processor import Processor
from ms_data.settings.arguments import check_counts, check_flags, check_fraction, check_strings
from ms_data.tokenization.tokenizer import Tokenizer
from ms_data.tokenization.word_encoder import WordsDifferError


def build(
    corpus: CorpusName,
    *,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    held_out_fraction: float = 0.0,
    shard_size_mib: int = 64,
    text_column: str = "text",
    skip_invalid: bool = False,
    chat: str | Path | ChatTemplate | None = None,
    pairs: bool = False,
    unpaired: bool = False,
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
        held_out_fraction: fraction of documents in the split `held_out`, from 0 to below 1, by a
            hash of their text.
        shard_size_mib: a shard is closed at the first document end past this size.
        text_column: column or JSON key with the text of a row.
        skip_invalid: skip documents that are not valid text instead of stopping.
        chat: a Jinja file or a tokenizer folder; rows then have the formats of `read_conversation`.
        pairs: with `chat`, rows are preference pairs; see `read_pair`.
        unpaired: with `chat`, rows are labeled responses; see `read_unpaired`.
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
    check_callable("on_progress", on_progress, error=SettingError)
    check_paths(out, corpus=corpus, tokenizer=tokenizer, chat=chat, processor=processor)
    check_flags(
        skip_invalid=skip_invalid, pairs=pairs, unpaired=unpaired, allow_special=allow_special
    )
    check_strings(text_column=text_column, shard=shard, workers=workers)
    encoder = make_encoder(
        tokenizer, chat, pairs=pairs, unpaired=unpaired, allow_special=allow_special
    )
    if processor is not None:
        encoder = with_media(encoder, processor, corpus)
    source = find_corpus(
        corpus,
        text_column=text_column,
        skip_invalid=skip_invalid,
        parse=encoder.parser,
        document_limit_mib=document_limit_mib,
    )
    recipe = _recipe(encoder, source, held_out_fraction, shard_size_mib)
    job = None if shard is None else ArrayShard.parse(shard, out, corpus)
    cluster = "" if workers is None else str(worker_count(workers))

    def make_run(encoder: TextEncoder) -> Run[EncodedDocs, BuildState, Summary]:
        return Run(
            command="build",
            corpus=corpus,
            source=source,
            recipe=recipe,
            work=WORK,
            # A job of an array tokenizes locally.
            process=partial(encode_batches, encoder, "" if job else cluster),
            output=ShardOutput(
                source=source,
                encoder=encoder,
                recipe=recipe,
                held_out_fraction=recipe["held_out_fraction"],
                shard_size_bytes=recipe["shard_size_bytes"],
            ),
            journal=Journal[BuildState],
            files=BUILD_FILES,
            noun="build",
            # Skipping invalid documents from here on, or a larger limit, changes no earlier one.
            may_change=["skip_invalid" if skip_invalid else "document_limit_mib"],
            on_progress=on_progress,
            on_skip=on_skip,
            shard=job,
        )

    run = make_run(encoder)
    try:
        summary = run.publish(out)
    except WordsDifferError as error:
        # The fast encoder disagrees with the `tokenizers` library, so earlier output may be wrong.
        run.discard(out)
        summary = make_run(encoder.with_library(str(error))).publish(out)
    if job is not None:
        job.remove_merged()
    return summary


def make_encoder(
    tokenizer: str | Path | Tokenizer,
    chat: str | Path | ChatTemplate | None,
    *,
    pairs: bool,
    unpaired: bool,
    allow_special: bool,
) -> TextEncoder:
    """Create the encoder of a build.

    Raises:
        SettingError: an argument needs a chat template and none is set, or the output of the
            template depends on the current date.
        TokenizerError: the tokenizer or the template cannot be read.
    """
    model = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    if chat is None:
        if pairs or unpaired or allow_special:
            raise SettingError("pairs, unpaired and allow_special need a chat template; set `chat`")
        try:
            return TextEncoder(tokenizer=model, words=model.word_encoder())
        except ValueError as error:
            return TextEncoder(tokenizer=model, library_reason=str(error))
    if pairs and unpaired:
        raise SettingError("rows are either pairs or unpaired, and both are set; remove one")
    kind: DocumentKind = "preferences" if pairs else "unpaired" if unpaired else "conversations"
    template = chat if isinstance(chat, ChatTemplate) else ChatTemplate.load(chat)
    if template.asks_date and template.today is None:
        raise SettingError(
            "the chat template prints today's date, so builds would differ from day to day; "
            "set the date with --today"
        )
    return ChatEncoder(
        template=template.with_tokens_of(model.folder),
        tokenizer=model,
        document_kind=kind,
        allow_special=allow_special,
    )


def _recipe(
    encoder: TextEncoder, source: Corpus, held_out_fraction: float, shard_size_mib: int
) -> dict[str, Any]:
    """Return everything that determines the bytes of a dataset, apart from the corpus."""
    check_counts(shard_size_mib=shard_size_mib)
    return {
        "tokenizer": encoder.tokenizer.digest,
        "end_of_text": encoder.tokenizer.end_of_text,
        "held_out_fraction": check_fraction("held_out_fraction", held_out_fraction),
        "shard_size_bytes": operator.index(shard_size_mib) << 20,
        "text_column": source.options.text_column,
        "libraries": f"tokenizers {tokenizers.__version__}, zstandard {zstandard.__version__}",
        # checksum of an instruction dataset's template, document type and settings; else empty
        "chat": encoder.digest,
        "skip_invalid": source.options.skip_invalid,
        "document_limit_mib": source.options.document_limit_mib,
    }
