"""Tokenizes a corpus word by word and by `encode_batch`, in turns, once the tokens are compared.

    python benchmarks/peers_tokenizing.py --corpus stdlib /usr/share/doc/linux-doc-6.1

Each tokenizer is a byte-level BPE trained on the corpus, behind a published pre-tokenizer. Each
turn of ours begins with an empty table and proves its sample, as a build does. Both are given the
same batches of documents in one process with the same threads; figures are MB of text a CPU
second, all threads together.
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
    """The documents as a build groups them."""
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
    """Processor seconds of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def compare(texts: list[str], tokenizer: Tokenizer, rounds: int) -> dict[str, object]:
    """Checks all tokens, then times the contenders in turns."""
    groups = list(batches(texts))
    library = tokenizer._model

    def ours() -> None:
        encoder = tokenizer.word_encoder()
        for group in groups:
            tokenizer.encode_by_words(group, encoder)

    def known(encoder: object) -> None:
        for group in groups:
            encoder.encode(group)  # type: ignore[attr-defined]

    def batch() -> None:
        for group in groups:
            [one.ids for one in library.encode_batch(group, add_special_tokens=False)]

    def fast() -> None:
        for group in groups:
            [one.ids for one in library.encode_batch_fast(group, add_special_tokens=False)]

    warm = tokenizer.word_encoder()
    tokens = 0
    for group in groups:
        expected = [one.ids for one in library.encode_batch(group, add_special_tokens=False)]
        assert [one.tolist() for one in warm.encode(group)] == expected
        tokens += sum(map(len, expected))
    size = sum(len(text.encode()) for text in texts) / 1e6
    works: dict[str, Callable[[], None]] = {
        "ours": ours,
        "ours, words known": lambda: known(warm),
        "encode_batch": batch,
        "encode_batch_fast": fast,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(cpu_s(work))
    rates = {name: size / statistics.median(found) for name, found in times.items()}
    ratios = {
        f"ours is faster than {name} by": round(rates["ours"] / rates[name], 1)
        for name in ("encode_batch", "encode_batch_fast")
    }
    return {
        "cut": warm.split.name,
        "documents, all tokens equal": len(texts),
        "tokens": tokens,
        "MB": round(size, 1),
        **{f"{name}, MB a CPU s": round(rate, 2) for name, rate in rates.items()},
        **ratios,
    }


def main() -> None:
    """Prints one JSON object a corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", nargs="+", default=["stdlib"], help="as for `ms-data build`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=16384)
    options = parser.parse_args()
    for corpus in options.corpus:
        read = find_corpus(corpus, skip_invalid=True).documents()
        texts = [document.text for document in read]
        gpt2 = train_tokenizer(corpus, vocab_size=options.vocab_size, skip_invalid=True)
        spec = json.loads(gpt2.content)
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(CL100K), "isolated")
        plain = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        other = tokenizers.Tokenizer.from_str(json.dumps(spec))
        other.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, plain])
        for tokenizer in (gpt2, Tokenizer(other.to_str().encode())):
            figures = {"corpus": corpus} | compare(texts, tokenizer, options.rounds)
            print(json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
