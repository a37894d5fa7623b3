"""Recall of planted near-duplicates by ms-data, datatrove and datasketch, and their speed.

    nox -s "peers(ms-data)"        or    python benchmarks/peers_dedup.py

Texts are 400 words drawn by their frequency in the standard library's docstrings. A planted
near-duplicate has words replaced so that its 5-grams have the target Jaccard similarity. All sign
5-grams of words with 14 bands of 8 rows.

Recall: fraction of planted pairs that share a band. Precision: fraction of planted pairs among all
pairs that share a band. Speed: MB per CPU second from text to band keys, alternating, datatrove on
a third of the texts. datasketch uses 112 hash functions and gets all n-grams of a text in one call
(`update_batch`), its fastest way.
"""

import argparse
import ast
import json
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ms_data.cleaning.words import plain_words
from ms_data.deduplication.clusters import join_equal_keys
from ms_data.deduplication.minhash import MinHash
from ms_data.deduplication.sorting import RECORD

BANDS, ROWS, WORDS = 14, 8, 5
LEVELS = (0.7, 0.8, 0.9)

Keys = Sequence[tuple[object, ...]]
"""Band keys of each text."""


def vocabulary() -> Counter[str]:
    """Count the words in the standard library's docstrings."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                words = plain_words((ast.get_docstring(node) or "").lower())
                counts.update(word for word in words if word.isalpha())
    return counts


def plant(pairs: int, length: int = 400) -> tuple[list[str], list[float]]:
    """Return texts, each followed by its near-duplicate, and the true similarity of each pair."""
    rng, words = random.Random(5), vocabulary()
    names, weights = list(words), list(words.values())
    texts, true = [], []
    for number in range(pairs):
        level = LEVELS[number % len(LEVELS)]
        original = rng.choices(names, weights, k=length)
        ngrams = length - WORDS + 1
        near_duplicate = list(original)
        edits = round(ngrams * (1 - level) / (1 + level) / WORDS)
        for position in rng.sample(range(WORDS, length - WORDS, WORDS), edits):
            near_duplicate[position] = "changed"
        texts += [" ".join(original), " ".join(near_duplicate)]
        a, b = (
            {tuple(sequence[i : i + WORDS]) for i in range(ngrams)}
            for sequence in (original, near_duplicate)
        )
        true.append(len(a & b) / len(a | b))
    return texts, true


def ours(texts: Sequence[str]) -> Keys:
    minhash = MinHash(bands=BANDS, rows=ROWS, ngram_words=WORDS)
    keys, _ = minhash.keys(minhash.signatures(texts))
    return [tuple(row) for row in keys.tolist()]


def datatrove(texts: Sequence[str]) -> Keys:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

    config = MinhashConfig(n_grams=WORDS, num_buckets=BANDS, hashes_per_bucket=ROWS)
    step = MinhashDedupSignature(tempfile.mkdtemp(), config)
    return [tuple(map(tuple, step.get_signature(step.get_shingles(text)))) for text in texts]


def datasketch(texts: Sequence[str]) -> Keys:
    from datasketch import MinHash as SketchMinHash

    keys = []
    for text in texts:
        words = text.split()
        sketch = SketchMinHash(num_perm=BANDS * ROWS)
        sketch.update_batch(
            [" ".join(words[at : at + WORDS]).encode() for at in range(len(words) - WORDS + 1)]
        )
        keys.append(tuple(map(tuple, sketch.hashvalues.reshape(BANDS, ROWS).tolist())))
    return keys


def recall_and_precision(keys: Keys, true: Sequence[float]) -> dict[str, object]:
    """Return recall by similarity, and precision."""
    matches = set()
    for band in range(BANDS):
        buckets: defaultdict[object, list[int]] = defaultdict(list)
        for number, row in enumerate(keys):
            buckets[row[band]].append(number)
        for members in buckets.values():
            matches |= {(a, b) for n, a in enumerate(members) for b in members[n + 1 :]}
    planted = {(2 * n, 2 * n + 1) for n in range(len(true))}
    recall = {}
    for number, level in enumerate(LEVELS):
        selected = [n for n in range(len(true)) if n % len(LEVELS) == number]
        theory = statistics.mean(1 - (1 - true[n] ** ROWS) ** BANDS for n in selected)
        recall_at_level = sum((2 * n, 2 * n + 1) in matches for n in selected) / len(selected)
        recall[f"{level}"] = {"found": round(recall_at_level, 3), "by theory": round(theory, 3)}
    return {"recall": recall, "precision": round(len(matches & planted) / max(1, len(matches)), 4)}


def measure_joining(documents: int) -> dict[str, float]:
    """Measure joining random signatures in a separate process: seconds and peak memory."""
    code = f"import peers_dedup as p; p.join_random({documents})"
    folder = str(Path(__file__).parent)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(result.stdout)
    return figures


def join_random(documents: int) -> None:
    """Join random signatures; one in ten documents matches another."""
    rng = np.random.default_rng(1)

    def frames() -> Sequence[bytes]:
        for start in range(0, documents, 2000):
            count = min(2000, documents - start)
            records = np.zeros((count, BANDS), RECORD)
            records["key"] = rng.integers(0, 2**64, (count, BANDS), dtype=np.uint64)
            same = rng.random(count) < 0.1
            records["key"][same, 0] = rng.integers(0, documents // 20, same.sum()) << 40
            records["document"] = np.arange(start, start + count)[:, None]
            yield records.tobytes()

    start_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        size = documents * BANDS * RECORD.itemsize
        joined = join_equal_keys(Path(folder), "j", frames(), documents=documents, size_bytes=size)
        later_count = int((joined.labels != np.arange(documents, dtype=np.uint32)).sum())
    cpu_s = time.process_time() - start_s
    status = Path("/proc/self/status").read_text()
    status_fields = dict(line.split(":", 1) for line in status.splitlines())
    own_mb = int(status_fields["RssAnon"].split()[0]) / 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        json.dumps(
            {
                "CPU s": round(cpu_s, 1),
                "peak MB, mapped files included": round(peak),
                "MB of anonymous memory at the end": round(own_mb),
                "later members": later_count,
            }
        )
    )


def main() -> None:
    """Print all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--signatures", type=int, nargs="*", default=[1_000_000, 4_000_000])
    options = parser.parse_args()
    texts, true = plant(options.pairs)
    size = sum(map(len, texts)) / 1e6
    work: dict[str, Callable[[Sequence[str]], Keys]] = {
        "ms-data": ours,
        "datatrove": datatrove,
        "datasketch": datasketch,
    }
    verdicts = {name: recall_and_precision(sign(texts), true) for name, sign in work.items()}
    rates: defaultdict[str, list[float]] = defaultdict(list)
    few = texts[: len(texts) // 3]
    for _ in range(options.rounds):
        for name, sign in work.items():
            subset = few if name == "datatrove" else texts  # all of them would take a minute
            start = time.process_time()
            sign(subset)
            rates[name].append(sum(map(len, subset)) / 1e6 / (time.process_time() - start))
    speed = {name: statistics.median(samples) for name, samples in rates.items()}
    figures = {
        "texts": len(texts),
        "MB": round(size, 1),
        "verdicts": verdicts,
        "MB per CPU s": {name: round(rate, 2) for name, rate in speed.items()},
        "faster by": {name: round(speed["ms-data"] / rate, 1) for name, rate in speed.items()},
        "joining": {
            f"{count:,} signatures": measure_joining(count) for count in options.signatures
        },
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
