"""The features of a run, and which pairs of them the oracle has proved together.

The oracle is a test that draws 300 layouts and holds every gradient of each against one process.
`proved_pairs.json` counts, for each pair of features, in how many of them both were used; a test
holds it against what is drawn.
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from itertools import combinations
from typing import Any

import msgspec

from ms_parallel.cluster.layout import AXES, Layout

TABLE = "proved_pairs.json"


class ProvedPairs(msgspec.Struct, frozen=True, kw_only=True):
    """What the oracle has held."""

    layouts: int
    """Drawn, each with a model and its options."""
    pairs: dict[str, int]
    """In how many of them both features of a pair were used, by `pair_name`."""


def pair_name(first: str, second: str) -> str:
    """Name a pair of features, whichever comes first."""
    return " x ".join(sorted((first, second)))


def features_of(layout: Layout, config: Any, options: Mapping[str, Any]) -> list[str]:
    """List what a run uses beside one process with all weights, in the words of its settings.

    Args:
        layout: its axes.
        config: of the model; what it lacks is not used.
        options: of the engine: `sharding`, `schedule`, `recompute`, `context_attention`, `balance`.
    """
    axes = [*AXES, "expert", "replicate"]
    found = [axis for axis in axes if getattr(layout, axis) > 1]
    if layout.shards * layout.replicate > 1 and options.get("sharding", "auto") != "auto":
        found.append(f"sharding={options['sharding']}")
    if layout.pipeline > 1:
        found.append(f"schedule={options.get('schedule', '1f1b')}")
    if layout.context > 1:
        found.append(f"context_attention={options.get('context_attention', 'auto')}")
    if options.get("recompute", "none") != "none":
        found.append(f"recompute={options['recompute']}")
    if options.get("balance", None):
        found.append(f"balance={options['balance']}")
    heads = getattr(config, "num_attention_heads", 0)
    model = {
        "experts": getattr(config, "mixture", None) is not None,
        "tied embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "grouped heads": getattr(config, "num_key_value_heads", heads) != heads,
        "sliding window": getattr(config, "sliding_window", None) is not None,
        "further prediction": bool(getattr(config, "num_nextn_predict_layers", 0)),
    }
    return found + [name for name, used in model.items() if used]


def count_pairs(runs: Iterable[list[str]]) -> ProvedPairs:
    """Count pairs over the features of runs."""
    counts: dict[str, int] = {}
    layouts = 0
    for features in runs:
        layouts += 1
        for pair in combinations(features, 2):
            name = pair_name(*pair)
            counts[name] = counts.get(name, 0) + 1
    return ProvedPairs(layouts=layouts, pairs=dict(sorted(counts.items())))


def proved_pairs() -> ProvedPairs:
    """Read the pairs that the oracle has held, as they came with this version."""
    content = files("ms_parallel.proof").joinpath(TABLE).read_bytes()
    return msgspec.json.decode(content, type=ProvedPairs)
