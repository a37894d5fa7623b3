"""Block sizes, warps and stages of kernels for a call's sizes.

Tunable values come from the tuning tables or from the defaults next to each kernel. This module
derives the constants that follow from a call's sizes, such as a block that spans a full row or is
no larger than the tensor.
"""

from collections.abc import Iterable, Mapping
from itertools import product

from ms_kernels.backends.triton.launching import blocks, power_of_two
from ms_kernels.core.launches import ANY_SIZE, Defaults, TableKey, TunedKernel, Values, by_size


def grid(**values: Iterable[int]) -> tuple[Mapping[str, int], ...]:
    """Return all combinations of the parameter values."""
    return tuple(dict(zip(values, point, strict=True)) for point in product(*values.values()))


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
    """Return the named kernels of an operator, all with the same tuning fields of `TunedKernel`."""
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
    """Return the forward and backward kernels of a normalization."""
    warps = {2048: 4, 4096: 8, ANY_SIZE: 16}
    tried_at = tuple({"...": 2**25 // width, "H": width} for width in (1024, 2048, 4096, 8192))
    values, programs = {"ELEMENTS": (1024, 2048, 4096), "num_warps": (4, 8, 16)}, (264, 528, 1056)
    forward, backward = (
        TunedKernel(
            operator=operator,
            name=f"{kernel}_{direction}",
            sizes=("H",),
            tried_at=tried_at,
            candidates=candidates,
            defaults=by_size("num_warps", warps, ELEMENTS=2048, **extra),
        )
        for direction, candidates, extra in (
            ("forward", grid(**values), {}),
            (
                "backward",
                grid(**values, PROGRAMS=programs, STAGES=(1, 3)),
                {"PROGRAMS": 256, "STAGES": 1},
            ),
        )
    )
    return forward, backward


WALKS = grid(BLOCK=(1024, 2048, 4096, 8192), num_warps=(4, 8, 16))
"""Tuning candidates of a kernel that loops over the columns of a row."""

WALK_DEFAULTS = by_size("num_warps", {512: 1, 1024: 2, 2048: 4, ANY_SIZE: 8}, BLOCK=4096)

MATRIX_TILES = grid(BM=(64, 128), BN=(64, 128), BK=(32, 64), num_warps=(4, 8), num_stages=(2, 3))
"""Tuning candidates of a matrix product."""

MATRIX_TILES_BACKWARD = grid(
    BM=(32, 64), BN=(32, 128), BK=(64, 128), num_warps=(4, 8), num_stages=(2, 3)
)


def whole_rows(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    """Return the constants of a kernel whose block spans a full row of `width` elements."""
    values, block = kernel.values(key, width), power_of_two(width)
    # A program has as many narrow rows as fit into ELEMENTS.
    rows = max(values["ELEMENTS"] // block, 1)
    constants = {"ROWS": rows, "BLOCK": block, "num_warps": values["num_warps"]}
    if "STAGES" in values:  # of the loop over rows
        constants["STAGES"] = values["STAGES"]
    return constants


def rows_per_program(kernel: TunedKernel, key: TableKey, rows: int, width: int) -> tuple[int, int]:
    """Return rows per program and number of programs of a normalization's backward pass.

    Each program accumulates a partial weight gradient, so the number of programs determines the
    rounding of the result. Rows per program are a multiple of the rows in one block.
    """
    block_rows = whole_rows(kernel, key, width)["ROWS"]
    max_programs = kernel.values(key, width)["PROGRAMS"]
    # At most max_programs programs, each with a whole number of blocks.
    program_rows = max(blocks(blocks(rows, block_rows), max_programs) * block_rows, block_rows)
    return program_rows, blocks(rows, program_rows)


def elements(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    """Return the constants of an element-wise kernel over rows of `width` elements."""
    values = kernel.values(key, width)
    block = min(power_of_two(width), values["ELEMENTS"])
    return {"ROWS": values["ELEMENTS"] // block, "BLOCK": block, "num_warps": values["num_warps"]}


def row_blocks(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    """Return the constants of a kernel that loops over rows of `width` elements block by block."""
    values = kernel.values(key, width)
    return {**values, "BLOCK": min(power_of_two(width), values["BLOCK"])}


def tile(kernel: TunedKernel, key: TableKey, rows: int) -> dict[str, int]:
    """Return the constants of a matrix product whose left operand has `rows` rows."""
    values = kernel.values(key, rows) if kernel.sizes else kernel.values(key)
    # tl.dot needs at least 16 rows.
    return {**values, "BM": min(max(power_of_two(rows), 16), values["BM"])}
