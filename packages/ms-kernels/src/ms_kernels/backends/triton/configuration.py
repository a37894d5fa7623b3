"""Block sizes, warps and stages of kernels, made to fit a call.

What a tuner may choose stands in the tuning tables, or as defaults beside each kernel. Computed
here is what follows from a call's sizes: a block that holds a whole row, or that is no larger than
the tensor.
"""

from collections.abc import Iterable, Mapping
from itertools import product

from ms_kernels.backends.triton.launching import blocks, power_of_two
from ms_kernels.core.launches import ANY_SIZE, Defaults, TableKey, TunedKernel, Values, by_size


def grid(**values: Iterable[int]) -> tuple[Mapping[str, int], ...]:
    """Return every combination of the values that the parameters may have."""
    return tuple(dict(zip(values, each, strict=True)) for each in product(*values.values()))


def tuned_kernels(
    operator: str,
    names: str,
    *,
    sizes: str = "",
    tried_at: tuple[Mapping[str, int], ...],
    candidates: tuple[Values, ...],
    defaults: Defaults,
    wide_defaults: Defaults = (),
) -> tuple[TunedKernel, ...]:
    """Return kernels of one operator that are tuned alike, by the fields of `TunedKernel`."""
    return tuple(
        TunedKernel(
            operator=operator,
            name=name,
            sizes=tuple(sizes.split()),
            tried_at=tried_at,
            candidates=candidates,
            defaults=defaults,
            wide_defaults=wide_defaults,
        )
        for name in names.split()
    )


def norm_kernels(operator: str, kernel: str) -> tuple[TunedKernel, TunedKernel]:
    """Return the forward and the backward kernel of a normalization."""
    warps = {2048: 4, 4096: 8, ANY_SIZE: 16}
    tried_at = tuple({"...": 2**25 // width, "H": width} for width in (1024, 2048, 4096, 8192))
    each, count = {"ELEMENTS": (1024, 2048, 4096), "num_warps": (4, 8, 16)}, (132, 264, 528)
    forward, backward = (
        TunedKernel(
            operator=operator,
            name=f"{kernel}_{which}",
            sizes=("H",),
            tried_at=tried_at,
            candidates=candidates,
            defaults=by_size("num_warps", warps, ELEMENTS=2048, **more),
        )
        for which, candidates, more in (
            ("forward", grid(**each), {}),
            ("backward", grid(**each, PROGRAMS=count), {"PROGRAMS": 256}),
        )
    )
    return forward, backward


WALKS = grid(BLOCK=(1024, 2048, 4096, 8192), num_warps=(4, 8, 16))
"""What a tuner tries for a kernel that walks along rows."""

WALK_DEFAULTS = by_size("num_warps", {512: 1, 1024: 2, 2048: 4, ANY_SIZE: 8}, BLOCK=4096)

MATRIX_TILES = grid(BM=(64, 128), BN=(64, 128), BK=(32, 64), num_warps=(4, 8), num_stages=(2, 3))
"""What a tuner tries for a product of matrices."""

MATRIX_TILES_BACKWARD = grid(
    BM=(32, 64), BN=(32, 128), BK=(64, 128), num_warps=(4, 8), num_stages=(2, 3)
)


def whole_rows(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    """Return the constants of a kernel that holds whole rows of `width` elements."""
    values, block = kernel.values(key, width), power_of_two(width)
    rows = max(values["ELEMENTS"] // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": values["num_warps"]}


def shares(kernel: TunedKernel, key: TableKey, rows: int, width: int) -> tuple[int, int]:
    """Return rows a program, and programs, of a normalization's backward pass.

    Each program keeps its own sum of the weight's gradient, so the number of programs decides how
    the result is rounded; a program's share is a multiple of the rows that it holds at once.
    """
    at_once = whole_rows(kernel, key, width)["ROWS"]
    most = kernel.values(key, width)["PROGRAMS"]
    each = max(blocks(blocks(rows, at_once), most) * at_once, at_once)
    return each, blocks(rows, each)


def elements(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    """Return the constants of an element-wise kernel over rows of `width` elements."""
    values = kernel.values(key, width)
    block = min(power_of_two(width), values["ELEMENTS"])
    return {"ROWS": values["ELEMENTS"] // block, "BLOCK": block, "num_warps": values["num_warps"]}


def row_blocks(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    """Return the constants of a kernel that walks along rows of `width` elements."""
    values = kernel.values(key, width)
    return {**values, "BLOCK": min(power_of_two(width), values["BLOCK"])}


def tile(kernel: TunedKernel, key: TableKey, rows: int) -> dict[str, int]:
    """Return the constants of a product of matrices with `rows` rows on the left."""
    values = kernel.values(key, rows) if kernel.sizes else kernel.values(key)
    return {**values, "BM": min(max(power_of_two(rows), 16), values["BM"])}
