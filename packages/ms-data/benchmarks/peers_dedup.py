"""Near-duplicates that were planted, found by us and by datatrove; speed beside datasketch.

    nox -s "peers(ms-data)"        or    python benchmarks/peers_dedup.py

Texts are 400 words drawn by their frequency in the standard library's documentation; a planted
near-duplicate has words replaced, so that its 5-grams have the Jaccard similarity asked for.
Both libraries sign with 14 bands of 8 rows, the same 5-grams of words. Recall: planted pairs of
which a band is the same. Precision: planted pairs among all pairs of texts with a band the same.
Speed: from text to the keys of bands, MB a CPU second, in turns, datatrove on a third of the texts;
datasketch takes 112 functions and is given the n-grams at once (`update_batch`), as its fastest
way is.
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
"""The keys of the bands of each text."""


def vocabulary() -> Counter[str]:
    """Words of the documentation of the standard library."""
    found: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                words = plain_words((ast.get_docstring(node) or "").lower())
                found.update(word for word in words if word.isalpha())
    return found


def plant(pairs: int, length: int = 400) -> tuple[list[str], list[float]]:
    """Texts, each followed by its near-duplicate, and the true similarity of each pair."""
    rng, words = random.Random(5), vocabulary()
    names, weights = list(words), list(words.values())
    texts, true = [], []
    for number in range(pairs):
        level = LEVELS[number % len(LEVELS)]
        one = rng.choices(names, weights, k=length)
        ngrams = length - WORDS + 1
        other = list(one)
        edits = round(ngrams * (1 - level) / (1 + level) / WORDS)
        for at in rng.sample(range(WORDS, length - WORDS, WORDS), edits):
            other[at] = "changed"
        texts += [" ".join(one), " ".join(other)]
        a, b = ({tuple(w[i : i + WORDS]) for i in range(ngrams)} for w in (one, other))
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
    from datasketch import MinHash as Theirs

    found = []
    for text in texts:
        words = text.split()
        one = Theirs(num_perm=BANDS * ROWS)
        one.update_batch(
            [" ".join(words[at : at + WORDS]).encode() for at in range(len(words) - WORDS + 1)]
        )
        found.append(tuple(map(tuple, one.hashvalues.reshape(BANDS, ROWS).tolist())))
    return found


def judged(keys: Keys, true: Sequence[float]) -> dict[str, object]:
    """Recall by similarity, and precision."""
    met = set()
    for band in range(BANDS):
        buckets: defaultdict[object, list[int]] = defaultdict(list)
        for number, row in enumerate(keys):
            buckets[row[band]].append(number)
        for members in buckets.values():
            met |= {(a, b) for n, a in enumerate(members) for b in members[n + 1 :]}
    planted = {(2 * n, 2 * n + 1) for n in range(len(true))}
    recall = {}
    for number, level in enumerate(LEVELS):
        these = [n for n in range(len(true)) if n % len(LEVELS) == number]
        theory = statistics.mean(1 - (1 - true[n] ** ROWS) ** BANDS for n in these)
        share = sum((2 * n, 2 * n + 1) in met for n in these) / len(these)
        recall[f"{level}"] = {"found": round(share, 3), "by theory": round(theory, 3)}
    return {"recall": recall, "precision": round(len(met & planted) / max(1, len(met)), 4)}


def sorting(documents: int) -> dict[str, float]:
    """Seconds and peak memory of joining so many signatures, in a process of its own."""
    code = f"import peers_dedup as p; p.join_random({documents})"
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def join_random(documents: int) -> None:
    """Joins random signatures, of which one in ten documents meets another."""
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

    began = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        size = documents * BANDS * RECORD.itemsize
        joined = join_equal_keys(Path(place), "j", frames(), documents=documents, size_bytes=size)
        later = int((joined.labels != np.arange(documents, dtype=np.uint32)).sum())
    spent = time.process_time() - began
    status = Path("/proc/self/status").read_text()
    facts = dict(line.split(":", 1) for line in status.splitlines())
    own = int(facts["RssAnon"].split()[0]) / 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        json.dumps(
            {
                "CPU s": round(spent, 1),
                "peak MB, mapped files included": round(peak),
                "MB of its own at the end": round(own),
                "later ones": later,
            }
        )
    )


def main() -> None:
    """Prints one JSON object."""
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
    verdicts = {name: judged(sign(texts), true) for name, sign in work.items()}
    rates: defaultdict[str, list[float]] = defaultdict(list)
    few = texts[: len(texts) // 3]
    for _ in range(options.rounds):
        for name, sign in work.items():
            these = few if name == "datatrove" else texts  # which takes a minute for all
            began = time.process_time()
            sign(these)
            rates[name].append(sum(map(len, these)) / 1e6 / (time.process_time() - began))
    speed = {name: statistics.median(found) for name, found in rates.items()}
    figures = {
        "texts": len(texts),
        "MB": round(size, 1),
        "verdicts": verdicts,
        "MB a CPU s": {name: round(rate, 2) for name, rate in speed.items()},
        "faster by": {name: round(speed["ms-data"] / rate, 1) for name, rate in speed.items()},
        "joining": {f"{count:,} signatures": sorting(count) for count in options.signatures},
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
