"""Create large traces from a real one by repeating its events, each copy with another time scale.

Scaling keeps spans nested and makes every number new, so that nothing compresses or caches better
than in a real trace of that size.
"""

import gzip
import random
import re
from pathlib import Path

__all__ = ["replicate"]

STAMP = '"ts": '
TIME = re.compile(r'("ts": |"dur": )([\d.]+)')


def replicate(source: Path, target: Path, size_bytes: int, *, seed: int = 0) -> int:
    """Write at least `size_bytes` of copies of `source` in Kineto's layout; return their number."""
    raw = source.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    opening = text.index("[", text.index('"traceEvents"')) + 1
    closing = text.rindex("]")
    pieces = TIME.split(text[opening:closing].strip())
    kinds = pieces[1::3]
    times = [float(value) for value in pieces[2::3]]
    starts = [t for t, kind in zip(times, kinds, strict=True) if kind == STAMP]
    first = min(starts)
    width = (max(starts) - first) * 1.3 + 1000
    random_scales = random.Random(seed)
    written = copies = 0
    with target.open("w") as file:
        file.write(text[:opening])
        while written < size_bytes:
            scale, shift = random_scales.uniform(0.8, 1.2), first + copies * width
            scaled_times = (
                shift + (t - first) * scale if kind == STAMP else t * scale
                for t, kind in zip(times, kinds, strict=True)
            )
            pieces[2::3] = [f"{t:.3f}" for t in scaled_times]
            copy = ("," if copies else "") + "\n  " + "".join(pieces)
            file.write(copy)
            written += len(copy)
            copies += 1
        file.write("\n  " + text[closing:])
    return copies
