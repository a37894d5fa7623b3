"""Arguments of a wrong type are refused with the package's error, in one line that names them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ms_align
import ms_compress
import ms_data
import ms_kernels
import ms_parallel
import ms_profile
from ms_parallel import checkpoint, schedules

BASES = (
    ms_align.AlignError,
    ms_compress.CompressError,
    ms_data.DataError,
    ms_kernels.KernelError,
    ms_parallel.ParallelError,
    ms_profile.ProfileError,
)
TOKENS = torch.zeros(2, 8, dtype=torch.int64)
ROW = torch.zeros(1, 4)
MODEL = torch.nn.Linear(2, 2)

CALLS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "advise": ("analysis", ms_profile.advise),
    "compare": ("before", lambda x: ms_profile.compare(x, x)),
    "diagnose": ("ledger", ms_profile.diagnose),
    "kernel_table": ("trace", ms_profile.kernel_table),
    "operator_table": ("trace", ms_profile.operator_table),
    "align_clocks": ("ends", ms_profile.align_clocks),
    "analyse_traces": ("traces", ms_profile.analyse_traces),
    "fit_link": ("times_s", lambda x: ms_profile.fit_link([1, 2], x)),
    "explain": ("operator", ms_kernels.explain),
    "Mixture names": ("names", ms_data.Mixture),
    "Mixture weights": ("weights", lambda x: ms_data.Mixture(["a"], [x])),
    "Phase": ("weights", lambda x: ms_data.Phase(0, [x])),
    "BestFitPacker": ("capacity", ms_data.BestFitPacker),
    "simulate": ("schedule", lambda x: schedules.simulate(x, x)),
    "verify": ("schedule", schedules.verify),
    "zb1p": ("costs", lambda x: schedules.zb1p(x, 4)),
    "draw_text": ("lines", schedules.draw_text),
    "draw_svg": ("lines", schedules.draw_svg),
    "path_text": ("line", schedules.path_text),
    "search": ("costs", lambda x: schedules.search(x, microbatches=2)),
    "named_schedule": ("ranks", lambda x: schedules.named_schedule("gpipe", x, 2)),
    "step_folder": ("step", lambda x: checkpoint.step_folder(Path(), x)),
    "keep_last": ("count", lambda x: checkpoint.keep_last(Path("none"), x)),
    "checkpoint.load": ("manifest", lambda x: checkpoint.load(Path("none"), x, {})),
    "masks": ("model", ms_compress.masks),
    "set_masks": ("masks", lambda x: ms_compress.set_masks(MODEL, x)),
    "qat": ("model", lambda x: ms_compress.qat(x, "ct.w8a8")),
    "prune": ("ignore", lambda x: ms_compress.prune(MODEL, "2:4", ignore=x)),
    "DataRanks": ("count", lambda x: ms_compress.DataRanks(0, x)),
    "gptq ranks": ("ranks", lambda x: ms_compress.gptq(MODEL, "ct.w8a8", [TOKENS], ranks=x)),
    "gptq": ("batches", lambda x: ms_compress.gptq(MODEL, "ct.w8a8", x)),
    "cut_student": ("teacher", ms_compress.cut_student),
    "perplexity": ("text", lambda x: ms_compress.perplexity(MODEL, x)),
    "tune": ("options", lambda x: ms_compress.tune(MODEL, TOKENS, x)),
    "distillation_loss": ("teacher", lambda x: ms_compress.distillation_loss(ROW, x)),
    "add_lora": ("model", ms_align.add_lora),
    "gae": ("values", lambda x: ms_align.gae(ROW, x, ROW)),
    "LocalEngine": ("heads", lambda x: ms_align.LocalEngine(MODEL, heads=x or 3)),
    "LocalEngine microbatch_size": (
        "microbatch_size",
        lambda x: ms_align.LocalEngine(MODEL, microbatch_size=x or "3"),
    ),
}
"""Name of the argument, and a call with its value."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", [None, "nonsense", object()], ids=["None", "a word", "object"])
def test_a_wrong_argument_is_named_in_one_line(name: str, value: Any) -> None:
    """Each of these raised an exception of Python or torch from inside."""
    argument, call = CALLS[name]
    with pytest.raises(BASES) as error:
        call(value)
    assert argument in str(error.value)
    assert "\n" not in str(error.value)


def test_a_value_of_several_lines_is_shown_in_one() -> None:
    """The repr of a tensor has several lines."""
    with pytest.raises(ms_compress.CompressError) as error:
        ms_compress.Tuning(steps=torch.zeros(2, 3))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_of_checkpoints_that_keeps_none_is_refused(tmp_path: Path, count: int) -> None:
    """-1 deleted the oldest, and 0 none."""
    checkpoint.save(checkpoint.step_folder(tmp_path, 1), {"a": ROW}, step=1, facts={})
    with pytest.raises(ms_parallel.CheckpointError, match="count must be an integer of at least 1"):
        checkpoint.keep_last(tmp_path, count)
    assert checkpoint.complete_steps(str(tmp_path)) == [1]
