"""QAT under data, tensor and pipeline parallelism equals QAT in one process, files included.

Training runs in float64: sums in another order then differ by about 1e-13 after three updates, and
no rounded value lies that close to a border between codes. In float32, with 1e-6, that would
depend on the processor. Losses are gathered in float32, whose spacing at 5 is 5e-7.
"""

import re
from math import prod
from pathlib import Path

import pytest
from processes import run_processes
from runs import export_same_weights, fitted_scales, train

RUNS = Path(__file__).parent / "runs.py"
SINGLE_PROCESS_LOSSES: dict[tuple[str, bool], list[float]] = {}
LAYOUTS = [
    {"data": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"data": 2, "tensor": 2},
    pytest.param({"data": 4}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "pipeline": 2}, marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
]


def single_process_losses(scheme: str, sparse: bool, folder: Path) -> list[float]:
    """Return the losses of the plain run, computed once."""
    if (scheme, sparse) not in SINGLE_PROCESS_LOSSES:
        SINGLE_PROCESS_LOSSES[scheme, sparse] = train({}, scheme, str(folder), sparse)["losses"]
    return SINGLE_PROCESS_LOSSES[scheme, sparse]


@pytest.mark.parametrize(
    "layout",
    LAYOUTS,
    ids=lambda layout: ",".join(f"{axis} {size}" for axis, size in layout.items()),
)
def test_losses_equal_a_single_process(layout: dict[str, int], tmp_path: Path) -> None:
    """Three updates with learned scales and 2:4 masks agree within 2e-6."""
    count = prod(layout.values())
    expected = single_process_losses("ct.int4_g32", True, tmp_path / "one")
    runs = run_processes(
        count,
        RUNS,
        "train",
        layout=layout,
        scheme="ct.int4_g32",
        folder=str(tmp_path / "out"),
        sparse=True,
    )
    for run in runs:
        assert run["losses"] == pytest.approx(expected, abs=2e-6)


def test_losses_without_learned_scales_equal_a_single_process(tmp_path: Path) -> None:
    """Within 2e-6 too: the scheme itself puts no weight on a border between codes."""
    expected = single_process_losses("ct.int3_g32", False, tmp_path / "one")
    layout = {"data": 2, "tensor": 2}
    runs = run_processes(
        4, RUNS, "train", layout=layout, scheme="ct.int3_g32", folder=str(tmp_path / "out")
    )
    for run in runs:
        assert run["losses"] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2, "pipeline": 2}], ids=str)
def test_tied_heads_train_as_in_a_single_process(layout: dict[str, int], tmp_path: Path) -> None:
    """Embedding and head share one weight, on one stage or two; within 2e-6."""
    count = prod(layout.values())
    expected = single_process_losses("gguf.q4_0", False, tmp_path / "one")
    runs = run_processes(
        count, RUNS, "train", layout=layout, scheme="gguf.q4_0", folder=str(tmp_path / "out")
    )
    for run in runs:
        assert run["losses"] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        *(("ct.w8a8", "llama"), ("ort.matmulnbits", "llama"), ("ct.int4_g32", "phi3")),
        pytest.param("ct.int4_g32", "llama", marks=pytest.mark.slow),
        pytest.param("gguf.q4_0", "llama", marks=pytest.mark.slow),
    ],
)
def test_files_from_shards_equal_a_single_process(scheme: str, family: str, tmp_path: Path) -> None:
    """Byte for byte, under every layout that the scheme allows; Phi-3's folder fuses matrices."""
    expected = export_same_weights({}, scheme, str(tmp_path / "one"), family)
    layouts = [{"data": 2, "pipeline": 2}]
    if scheme != "ct.w8a8":  # one scale per row, so rows cannot be split
        layouts.append({"data": 2, "tensor": 2})
    for number, layout in enumerate(layouts):
        runs = run_processes(
            4,
            RUNS,
            "export_same_weights",
            layout=layout,
            scheme=scheme,
            folder=str(tmp_path / str(number)),
            family=family,
        )
        assert all(run == expected for run in runs)


def test_masks_of_unevenly_split_rows_are_exported(tmp_path: Path) -> None:
    """97 rows are split into 49 and 48, and FSDP shards of 25, 24, 24 and 24: the same file."""
    for digests in run_processes(4, RUNS, "export_odd_rows", folder=str(tmp_path)):
        assert len(set(digests.values())) == 1


def test_wrappers_do_not_change_the_exported_files(tmp_path: Path) -> None:
    """Compiled, checkpointed, replicated or sharded: bytes and names of the plain model."""
    for digests in run_processes(2, RUNS, "export_wrapped", folder=str(tmp_path)):
        assert len(digests["plain"]) == 9  # files of three targets
        assert all(files == digests["plain"] for files in digests.values())


@pytest.mark.parametrize("layout", [{"data": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("limit_bytes", [None, 20_000, 10**6], ids=["exists", "early", "late"])
def test_all_processes_end_when_one_cannot_write(
    limit_bytes: int | None, layout: dict[str, int], tmp_path: Path
) -> None:
    """Process 0 fails before, while or after others send; all end with its reason."""
    folder, tokenizer = tmp_path / "new" / "out", tmp_path / "tokenizer.json"
    tokenizer.write_text('{"model": {"vocab": {}}}'.ljust(2 * 10**6))
    if limit_bytes is None:
        folder.mkdir(parents=True)
    first, second = run_processes(
        2,
        RUNS,
        "export_that_fails",
        timeout_s=60,
        layout=layout,
        folder=str(folder),
        tokenizer=str(tokenizer),
        limit_bytes=limit_bytes,
    )
    reason = "exists; remove it" if limit_bytes is None else "File too large"
    assert re.match(f"WriteError: .*{reason}", first)
    assert re.match(f"ExportError: process 0 failed.*{reason}", second)
    assert [*folder.parent.iterdir()] == ([folder] if limit_bytes is None else [])


def test_wrapping_orders_work_or_are_refused() -> None:
    """Every order computes the single-process result or raises when the model is prepared."""
    for outcomes in run_processes(2, RUNS, "wrapping_orders", split=True):
        working = ["qat, split", "split, qat", "split, learned", "qat, shard", "shard, qat"]
        working += ["learned, shard", "learned, replicate", "replicate, qat"]
        assert {outcomes[name] for name in working} == {"equal"}
        assert "split the model first, then prepare it" in outcomes["learned, split"]
        assert "prepare the model first, then shard it" in outcomes["shard, learned"]
        for order in ("split, wide", "wide, split"):
            assert "splitting rows of 64 over 2 processes cuts groups of 64" in outcomes[order]
        assert "one scale per row" in outcomes["split, whole rows"]
        for order in ("shard, prune", "shard, mask", "shard, zeros"):
            assert "prune it before sharding it" in outcomes[order]
        assert "prepare the model first, then wrap it" in outcomes["replicate, learned"]
        for order in ("two axes, qat", "qat, two axes"):
            assert "split over 2 mesh axes; split linear layers over one" in outcomes[order]
        assert "prune the model before splitting it" in outcomes["split, zeros"]


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2), (2, 2)])
def test_masked_weights_are_zero_on_every_process(data: int, tensor: int) -> None:
    """Sharded, split or both; other weights are unchanged."""
    for zeroed in run_processes(
        data * tensor, RUNS, "masked_weights_are_zeroed", data=data, tensor=tensor
    ):
        assert zeroed == {"0": True, "1": True}


def test_fitted_scales_on_shards_equal_a_single_process() -> None:
    """Also for a pruned model, where every process has the full mask."""
    expected = fitted_scales(shard=False)
    assert any(value != 0 for row in expected for value in row)
    for scales in run_processes(2, RUNS, "fitted_scales", shard=True):
        assert scales == expected
