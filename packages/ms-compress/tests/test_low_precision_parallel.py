"""Low-precision exports from several processes equal single-process exports."""

from pathlib import Path

from low_precision_runs import export_schemes
from processes import run_processes

RUNS = Path(__file__).parent / "low_precision_runs.py"
ROW_SCHEMES = ["ct.fp8_dynamic", "ct.mxfp4", "ct.w4a16_asym_g32"]
MULTI_ROW_SCHEMES = ["ct.fp8", "ct.fp8_block", "ct.nvfp4"]


def test_files_from_fsdp_shards_equal_a_single_process(tmp_path: Path) -> None:
    """Files are bitwise equal, even if a scale depends on the shards of both processes."""
    schemes = [*ROW_SCHEMES, *MULTI_ROW_SCHEMES]
    expected = export_schemes({}, schemes, str(tmp_path / "one"))
    assert not any("Error" in digest for digest in expected.values()), expected
    runs = run_processes(
        2, RUNS, "export_schemes", layout={"data": 2}, schemes=schemes, folder=str(tmp_path / "two")
    )
    assert all(run == expected for run in runs)


def test_tensor_parallelism_supports_only_scales_within_a_row(
    tmp_path: Path,
) -> None:
    """Schemes whose scales span rows are refused with one line that names schemes to use."""
    grouped = ["ct.mxfp4", "ct.w4a16_asym_g32"]
    expected = export_schemes({}, grouped, str(tmp_path / "one"))
    runs = run_processes(
        2,
        RUNS,
        "export_schemes",
        layout={"tensor": 2},
        schemes=[*grouped, *MULTI_ROW_SCHEMES],
        folder=str(tmp_path / "two"),
    )
    for run in runs:
        assert {name: run[name] for name in grouped} == expected
        for name in MULTI_ROW_SCHEMES:
            assert run[name].startswith("OrderError: ")
            assert "ct.mxfp8" in run[name]
            assert "\n" not in run[name]
