"""QAT under data, tensor and pipeline parallelism is QAT in one process; so are its files.

Trainings are in float64: sums in another order then differ by some 1e-13 after three updates, and
no value that is rounded lies so near to the border of two codes. In float32, with 1e-6, whether one
does depends on the processor. Losses are gathered in float32, 5e-7 apart at 5.
"""

import re
from math import prod
from pathlib import Path

import pytest
from processes import run_processes
from runs import export_same_weights, fitted, train

RUNS = Path(__file__).parent / "runs.py"
ONE: dict[tuple[str, bool], list[float]] = {}
LAYOUTS = [
    {"data": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"data": 2, "tensor": 2},
    pytest.param({"data": 4}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "pipeline": 2}, marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
]


def of_one_process(scheme: str, sparse: bool, folder: Path) -> list[float]:
    """Losses of the plain run, run once."""
    if (scheme, sparse) not in ONE:
        ONE[scheme, sparse] = train({}, scheme, str(folder), sparse)["losses"]
    return ONE[scheme, sparse]


@pytest.mark.parametrize(
    "layout",
    LAYOUTS,
    ids=lambda layout: ",".join(f"{axis} {size}" for axis, size in layout.items()),
)
def test_losses_equal_those_of_one_process(layout: dict[str, int], tmp_path: Path) -> None:
    """Three updates with learned scales and 2:4 masks agree within 2e-6."""
    count = prod(layout.values())
    expected = of_one_process("ct.int4_g32", True, tmp_path / "one")
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


def test_losses_at_the_schemes_own_scales_equal_those_of_one_process(tmp_path: Path) -> None:
    """Within 2e-6 too: no weight lies on a border between codes by the scheme's own doing."""
    expected = of_one_process("ct.int3_g32", False, tmp_path / "one")
    layout = {"data": 2, "tensor": 2}
    runs = run_processes(
        4, RUNS, "train", layout=layout, scheme="ct.int3_g32", folder=str(tmp_path / "out")
    )
    for run in runs:
        assert run["losses"] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2, "pipeline": 2}], ids=str)
def test_tied_heads_train_alike(layout: dict[str, int], tmp_path: Path) -> None:
    """Embedding and head of one weight, on one stage or two, within 2e-6."""
    count = prod(layout.values())
    expected = of_one_process("gguf.q4_0", False, tmp_path / "one")
    runs = run_processes(
        count, RUNS, "train", layout=layout, scheme="gguf.q4_0", folder=str(tmp_path / "out")
    )
    for run in runs:
        assert run["losses"] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        *((each, "llama") for each in ("ct.int4_g32", "ct.w8a8", "gguf.q4_0", "ort.matmulnbits")),
        ("ct.int4_g32", "phi3"),
    ],
)
def test_files_from_shards_are_those_of_one_process(
    scheme: str, family: str, tmp_path: Path
) -> None:
    """Byte for byte, under every layout that takes the scheme; Phi-3's folder fuses matrices."""
    expected = export_same_weights({}, scheme, str(tmp_path / "one"), family)
    layouts = [{"data": 2, "pipeline": 2}]
    if scheme != "ct.w8a8":  # one scale per row, so rows may not be split
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


def test_masks_of_rows_that_split_unevenly_are_exported(tmp_path: Path) -> None:
    """97 rows are 49 and 48, of which FSDP's shards are 25, 24, 24 and 24: the same file."""
    for found in run_processes(4, RUNS, "export_odd_rows", folder=str(tmp_path)):
        assert len(set(found.values())) == 1


def test_what_wraps_a_model_is_not_in_its_files(tmp_path: Path) -> None:
    """Compiled, checkpointed, replicated or sharded: byte for byte the plain model's, names too."""
    for found in run_processes(2, RUNS, "export_wrapped", folder=str(tmp_path)):
        assert len(found["plain"]) == 9  # files of three targets
        assert all(files == found["plain"] for files in found.values())


@pytest.mark.parametrize("layout", [{"data": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("limit_bytes", [None, 20_000, 10**6], ids=["exists", "early", "late"])
def test_no_process_waits_for_one_that_cannot_write(
    limit_bytes: int | None, layout: dict[str, int], tmp_path: Path
) -> None:
    """The first fails before others send, while they do, or after: all end, with its reason."""
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


def test_orders_of_wrapping_are_right_or_refused() -> None:
    """Each order computes what one process does, or raises when the model is prepared."""
    for found in run_processes(2, RUNS, "orders", split=True):
        fine = ["qat, split", "split, qat", "split, learned", "qat, shard", "shard, qat"]
        fine += ["learned, shard", "learned, replicate", "replicate, qat"]
        assert {found[name] for name in fine} == {"equal"}
        assert "split the model first, then prepare it" in found["learned, split"]
        assert "prepare the model first, then shard it" in found["shard, learned"]
        for order in ("split, wide", "wide, split"):
            assert "splitting rows of 64 over 2 processes cuts groups of 64" in found[order]
        assert "one scale per row" in found["split, whole rows"]
        for order in ("shard, prune", "shard, mask", "shard, zeros"):
            assert "prune it before sharding it" in found[order]
        assert "prepare the model first, then wrap it" in found["replicate, learned"]
        for order in ("two axes, qat", "qat, two axes"):
            assert "split over 2 mesh axes; split linear layers over one" in found[order]
        assert "prune the model before splitting it" in found["split, zeros"]


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2), (2, 2)])
def test_what_is_masked_is_stored_as_zero_on_every_process(data: int, tensor: int) -> None:
    """Sharded, split or both; weights that stay are left as they are."""
    for found in run_processes(data * tensor, RUNS, "zeros_kept", data=data, tensor=tensor):
        assert found == {"0": True, "1": True}


def test_scales_are_fitted_on_shards_as_in_one_process() -> None:
    """So are those of a pruned model, whose mask each process has whole."""
    expected = fitted(shard=False)
    assert any(value != 0 for row in expected for value in row)
    for found in run_processes(2, RUNS, "fitted", shard=True):
        assert found == expected
