"""Indices are data, which are looked at on the CPU alone.

Where torch itself refuses a bad index they are looked at once it has, to say which is wrong; else
before. On an accelerator that would wait for the device: kernels do not read what is out of range.
"""

import torch
from torch import Tensor

from ms_kernels.errors import ArgumentError

__all__ = ["check_classes", "check_counts", "check_pages", "check_places", "check_range"]


def check_classes(
    operator: str, targets: Tensor, count: int, ignore_index: int, name: str = "targets"
) -> None:
    """Refuse a class that is neither from 0 to count - 1 nor `ignore_index`."""
    if not _readable(targets):
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= count))]
    if wrong.numel():
        got, fits = f"{wrong[0].item()} somewhere", f"from 0 to {count - 1}, or {ignore_index}"
        raise ArgumentError(operator, name, got, fits)


def check_range(operator: str, name: str, indices: Tensor, count: int) -> None:
    """Refuse an index that is not from 0 to count - 1."""
    if not _readable(indices):
        return
    wrong = indices[(indices < 0) | (indices >= count)]
    if wrong.numel():
        raise ArgumentError(
            operator, name, f"{wrong[0].item()} somewhere", f"from 0 to {count - 1}"
        )


def check_pages(
    page_table: Tensor, lengths: Tensor, pages: int, page: int, window: int | None
) -> None:
    """Refuse a length beyond the table, and an entry in use that is no page."""
    if not (_readable(page_table) and _readable(lengths)):
        return
    check_range("decode_attention", "lengths", lengths, page_table.shape[1] * page + 1)
    starts = torch.arange(page_table.shape[1]) * page
    used = starts < lengths[:, None]
    if window is not None:
        reach = min(window, page_table.shape[1] * page)  # lengths are of 32 bits
        used &= starts + page > lengths[:, None] - reach
    check_range("decode_attention", "page_table", page_table[used], pages)


def check_places(places: Tensor, rows: int) -> None:
    """Refuse a place that is no row, and a row that two places name."""
    if not _readable(places):
        return
    check_range("unpermute_tokens", "places", places, rows)
    named = torch.bincount(places.reshape(-1), minlength=rows)
    twice = (named > 1).nonzero()
    if twice.numel():
        got = f"{twice[0].item()} more than once"
        raise ArgumentError("unpermute_tokens", "places", got, "each row once")


def check_counts(counts: Tensor, rows: int) -> None:
    """Refuse a count below 0, or a sum that is not the number of rows."""
    if not _readable(counts):
        return
    check_range("grouped_matmul", "counts", counts, rows + 1)
    if int(counts.sum()) != rows:
        fits = f"{rows} in sum, the rows of x"
        raise ArgumentError("grouped_matmul", "counts", f"{int(counts.sum())} in sum", fits)


def _readable(tensor: Tensor) -> bool:
    """Whether its numbers can be looked at without waiting for a device."""
    if torch.compiler.is_compiling():
        return False
    return type(tensor) is Tensor and tensor.device.type == "cpu"
