"""SFT and DPO give the same results under any layout as in one process."""

import json
import os
import socket
from pathlib import Path

import pytest
from processes import Command

from ms_align import ConfigError, SFTTrainer
from ms_data import build, inspect

from .instruction_sets import instruction_rows, preference_rows
from .layout_run import run
from .uneven_run import run_uneven

SCRIPT = Path(__file__).with_name("layout_run.py")
UNEVEN = Path(__file__).with_name("uneven_run.py")


def run_under(
    layout: dict[str, int], sets: Path, folder: Path, script: Path = SCRIPT
) -> dict[str, list[float]]:
    """Run the script in two processes and return the result of the first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        Command(
            [str(script), str(sets), str(folder), json.dumps(layout)],
            environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            imports=("ms_align.trainers.sft", "ms_parallel.engine.engine", "ms_data"),
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1] + outputs[1][1]
    metrics: dict[str, list[float]] = json.loads(outputs[0][0].splitlines()[-1])
    return metrics


@pytest.fixture(scope="module")
def single(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return the metrics of a single process."""
    return run(sets, tmp_path_factory.mktemp("alone"), None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_sft_and_dpo_are_the_same_under_a_layout(
    sets: Path, tmp_path: Path, single: dict[str, list[float]], axis: str
) -> None:
    """Losses, task and held-out metrics agree at every step within 1e-5; also with adapters."""
    split = run_under({axis: 2}, sets, tmp_path)
    assert split.keys() == single.keys()
    for name, values in single.items():
        # Float32 sums in another order: losses of size 6 agree to 1e-6 relative. Adam's first steps
        # have size ±learning rate and amplify the rounding of gradients near 0.
        tolerance = 1e-4 if "grad_norm" in name else 1e-5
        assert split[name] == pytest.approx(values, rel=tolerance, abs=tolerance), name


def build_few(sets: Path, folder: Path) -> None:
    """Write folders `few` and `few_pairs` with one held-out row and one held-out pair."""
    for name, rows in (("few", instruction_rows("copy", 30)), ("few_pairs", preference_rows(30))):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(example) + "\n" for example in rows))
        for percent in range(1, 20):  # the text decides which documents are held out
            out = folder / f"{name}-{percent}"
            build(
                path,
                tokenizer=sets / "tokenizer.json",
                out=out,
                chat=sets / "chat.jinja",
                pairs=name == "few_pairs",
                held_out_fraction=percent / 100,
            )
            if "held_out" in (splits := inspect(out).splits):
                break
        assert splits["held_out"].documents == 1
        out.rename(folder / name)


@pytest.mark.timeout(300)
def test_ranks_without_rows_or_targets_change_nothing(sets: Path, tmp_path: Path) -> None:
    """One held-out row for two ranks, and a first batch with targets on a single rank."""
    build_few(sets, tmp_path)
    (tmp_path / "alone").mkdir()
    for name in ("few", "few_pairs"):
        (tmp_path / "alone" / name).symlink_to(tmp_path / name)
    single = run_uneven(sets, tmp_path / "alone", None)
    split = run_under({"data": 2}, sets, tmp_path, UNEVEN)
    assert {"sft evaluate held_out_loss", "dpo evaluate held_out_loss"} <= single.keys()
    assert split.keys() == single.keys()
    for name, values in single.items():
        tolerance = 1e-4 if "grad_norm" in name else 1e-5  # as above
        assert split[name] == pytest.approx(values, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("layout", [{"data": 0}, {"expert": 2}, {"data": "x"}, {"date": 2}])
def test_an_impossible_layout_is_rejected_in_one_line(layout: dict[str, object]) -> None:
    """The error class belongs to this package."""
    with pytest.raises(ConfigError) as error:
        _ = SFTTrainer(model="folder", steps=1, layout=layout).processes
    assert "\n" not in str(error.value)
