"""Tokenize a corpus word by word and with `encode_batch`, alternating, after comparing all tokens.

    python benchmarks/peers_tokenizing.py --corpus stdlib /usr/share/doc/linux-doc-6.1

Each tokenizer is a byte-level BPE trained on the corpus, with a published pre-tokenizer. Every
round of ours starts with an empty table and verifies its sample, as a build does. Both get the same
batches of documents in one process with the same threads. Results are MB of text per CPU second,
over all threads.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import tokenizers

from ms_data import Tokenizer, train_tokenizer
from ms_data.corpus.find import find_corpus

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def batches(texts: Sequence[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    """Yield batches of documents as a build does."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    yield batch


def cpu_s(work: Callable[[], object]) -> float:
    """Return CPU seconds of one call, over all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(texts: list[str], tokenizer: Tokenizer, rounds: int) -> dict[str, object]:
    """Compare all tokens, then time the contenders alternately."""
    groups = list(batches(texts))
    library = tokenizer._model

    def ours() -> None:
        encoder = tokenizer.word_encoder()
        for group in groups:
            tokenizer.encode_by_words(group, encoder)

    def encode_warm(encoder: object) -> None:
        for group in groups:
            encoder.encode(group)  # type: ignore[attr-defined]

    def batch() -> None:
        for group in groups:
            [encoding.ids for encoding in library.encode_batch(group, add_special_tokens=False)]

    def fast() -> None:
        for group in groups:
            [
                encoding.ids
                for encoding in library.encode_batch_fast(group, add_special_tokens=False)
            ]

    warm = tokenizer.word_encoder()
    tokens = 0
    for group in groups:
        expected = [
            encoding.ids for encoding in library.encode_batch(group, add_special_tokens=False)
        ]
        assert [ids.tolist() for ids in warm.encode(group)] == expected
        tokens += sum(map(len, expected))
    size = sum(len(text.encode()) for text in texts) / 1e6
    works: dict[str, Callable[[], None]] = {
        "ours": ours,
        "ours, words cached": lambda: encode_warm(warm),
        "encode_batch": batch,
        "encode_batch_fast": fast,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(cpu_s(work))
    rates = {name: size / statistics.median(seconds) for name, seconds in times.items()}
    ratios = {
        f"ours is faster than {name} by": round(rates["ours"] / rates[name], 1)
        for name in ("encode_batch", "encode_batch_fast")
    }
    return {
        "split": warm.split.name,
        "documents, all tokens equal": len(texts),
        "tokens": tokens,
        "MB": round(size, 1),
        **{f"{name}, MB per CPU s": round(rate, 2) for name, rate in rates.items()},
        **ratios,
    }


def main() -> None:
    """Print one JSON object per corpus and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", nargs="+", default=["stdlib"], help="as for `ms-data build`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=16384)
    options = parser.parse_args()
    for corpus in options.corpus:
        documents = find_corpus(corpus, skip_invalid=True).documents()
        texts = [document.text for document in documents]
        gpt2 = train_tokenizer(corpus, vocab_size=options.vocab_size, skip_invalid=True)
        spec = json.loads(gpt2.content)
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(CL100K), "isolated")
        plain = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cl100k = tokenizers.Tokenizer.from_str(json.dumps(spec))
        cl100k.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, plain])
        for tokenizer in (gpt2, Tokenizer(cl100k.to_str().encode())):
            figures = {"corpus": corpus} | compare(texts, tokenizer, options.rounds)
            print(json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
