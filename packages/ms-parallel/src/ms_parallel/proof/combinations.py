"""Features of a run, and the pairs of features that the oracle has verified together.

The oracle is a test that draws 300 random layouts and compares every gradient of each with one
process. `proved_pairs.json` counts the layouts with both features of each pair; a test compares it
with the layouts that are drawn.
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from itertools import combinations
from typing import Any

import msgspec

from ms_parallel.cluster.layout import AXES, Layout

TABLE = "proved_pairs.json"


class ProvedPairs(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of features that proofs have covered."""

    layouts: int
    """Number of layouts, each with a model and options."""
    pairs: dict[str, int]
    """Number of layouts with both features of a pair, by `pair_name`."""


def pair_name(first: str, second: str) -> str:
    """Name of a pair of features, independent of their order."""
    return " x ".join(sorted((first, second)))


def features_of(layout: Layout, config: Any, options: Mapping[str, Any]) -> list[str]:
    """List the features of a run beyond one process with full weights, named by their settings.

    Args:
        layout: layout of the run.
        config: model configuration; missing settings count as unused.
        options: engine options `sharding`, `schedule`, `recompute`, `context_attention` and
            `balance`.
    """
    axes = [*AXES, "expert", "replicate"]
    features = [axis for axis in axes if getattr(layout, axis) > 1]
    if layout.shards * layout.replicate > 1 and options.get("sharding", "auto") != "auto":
        features.append(f"sharding={options['sharding']}")
    if layout.pipeline > 1:
        features.append(f"schedule={options.get('schedule', '1f1b')}")
    if layout.context > 1:
        features.append(f"context_attention={options.get('context_attention', 'auto')}")
    if options.get("recompute", "none") != "none":
        features.append(f"recompute={options['recompute']}")
    if options.get("balance", None):
        features.append(f"balance={options['balance']}")
    heads = getattr(config, "num_attention_heads", 0)
    model = {
        "experts": getattr(config, "mixture", None) is not None,
        "tied embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "grouped heads": getattr(config, "num_key_value_heads", heads) != heads,
        "sliding window": getattr(config, "sliding_window", None) is not None,
        "further prediction": bool(getattr(config, "num_nextn_predict_layers", 0)),
    }
    return features + [name for name, used in model.items() if used]


def count_pairs(runs: Iterable[list[str]]) -> ProvedPairs:
    """Count the pairs over the features of runs."""
    counts: dict[str, int] = {}
    layouts = 0
    for features in runs:
        layouts += 1
        for pair in combinations(features, 2):
            name = pair_name(*pair)
            counts[name] = counts.get(name, 0) + 1
    return ProvedPairs(layouts=layouts, pairs=dict(sorted(counts.items())))


def proved_pairs() -> ProvedPairs:
    """Read the verified pairs of this version."""
    content = files("ms_parallel.proof").joinpath(TABLE).read_bytes()
    return msgspec.json.decode(content, type=ProvedPairs)
