"""Process groups of collectives, from torch's flight recorder, for backends whose scopes lack them.

The flight recorder keeps the last collectives with their groups, at 1.5 µs each, but on gloo not
their durations; Kineto has the durations but not the groups. The flight recorder's entries of a
window are stored in its trace under `ms_profile_groups`. Needs torch.
"""

import json
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist

KEY: Final = "ms_profile_groups"


def recorded_groups(since_ns: int) -> str | None:
    """Return the collectives created since a wall-clock time in ns, as JSON to store in a trace.

    `names` and `groups` are string tables; `entries` has rows of (name, group, elements,
    creation time in ns). Returns None without torch.distributed, flight recorder or collectives.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    names: dict[str, int] = {}
    groups: dict[str, int] = {}
    rows = [
        (
            names.setdefault(entry["profiling_name"], len(names)),
            groups.setdefault(entry["process_group"][0], len(groups)),  # (name, description)
            _elements(entry),
            entry["time_created_ns"],
        )
        for entry in json.loads(dump()).get("entries", ())
        # The buffer also has collectives from before the window. Sends have no match by order.
        if entry["time_created_ns"] >= since_ns and not entry["is_p2p"]
    ]
    if not rows:
        return None
    return json.dumps({"names": list(names), "groups": list(groups), "entries": rows})


def _elements(entry: dict[str, Any]) -> int:
    return sum(prod(sides) for sides in entry["input_sizes"])
