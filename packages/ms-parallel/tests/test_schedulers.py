"""Processes started by a cluster scheduler form one run, or the error says how to start them."""

import os
from pathlib import Path

import pytest
from launching import IMPORTS, environment, events, words, write_corpus, write_run
from processes import Command

from ms_parallel.cluster.slurm import first_node
from ms_parallel.errors import LaunchError


def start(run: Path, **variables: str) -> Command:
    """A process with the variables of a launcher."""
    return Command(words(run, 1), environment=environment(**variables), imports=IMPORTS)


def test_two_tasks_of_srun_train_one_model(tmp_path: Path) -> None:
    """They connect with only SLURM's variables, and the layout covers both."""
    run = write_run(tmp_path / "run.toml", write_corpus(tmp_path / "corpus"), steps=2)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = [start(run, SLURM_PROCID=str(n), SLURM_LOCALID=str(n), **step) for n in range(2)]
    outputs = [task.communicate(timeout=200) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    (begin,) = events(run, "begin")
    assert begin["layout"] == "data=2"


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_launcher_without_a_rendezvous_address_is_refused(name: str, tmp_path: Path) -> None:
    """Otherwise each process would train alone; the message says how to start them together."""
    (tmp_path / "corpus").mkdir()
    run = write_run(tmp_path / "run.toml", tmp_path / "corpus", steps=2)
    task = start(run, **{name: "2", "SLURM_PROCID": "0"})
    _, stderr = task.communicate(timeout=200)
    assert task.returncode == 2
    assert (
        f"{name} is 2 but the rendezvous address is missing; start the processes with `srun"
        in stderr
    )
    assert not run.with_suffix("").exists()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("gpu[007-009,012],big1", "gpu007"), ("a-[3,5]-x", "a-3-x"), ("b,c", "b")],
)
def test_the_first_node_of_a_list_is_parsed(nodes: str, first: str) -> None:
    """SLURM abbreviates lists by ranges; leading zeros are part of a name."""
    assert first_node(nodes) == first


def test_an_empty_node_list_is_refused() -> None:
    """The remedy is to set MASTER_ADDR."""
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        first_node("")
