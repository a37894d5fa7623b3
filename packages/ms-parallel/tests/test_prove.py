"""`ms-parallel prove` finds planted faults, and nothing in correct models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planted import FAULTS
from processes import run_command, run_processes

from ms_parallel.errors import ConfigError
from ms_parallel.models import TransformersModel
from ms_parallel.models.registry import architectures
from ms_parallel.proof import launch
from ms_parallel.proof.draw import draw_cases
from ms_parallel.proof.page import draw_page
from ms_parallel.proof.prove import prove
from ms_parallel.proof.records import Job
from ms_parallel.proof.subject import open_subject

PLANTED = Path(__file__).parent / "planted.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the references of all subjects, whose checks pass without a fault."""
    root = tmp_path_factory.mktemp("references")
    subjects = sorted({fault.subject for fault in FAULTS.values()})
    (failures,) = run_processes(1, PLANTED, "reference", subjects=subjects, folder=str(root))
    assert failures == [[] for _ in subjects]
    return root


SAMPLE = [
    "ties unsummed",
    "weights of losses unsummed",
    "maxima unsettled",
    "logits ungathered",
    "averaged over data",
    "a microbatch's share",
    "recomputed twice",
    "positions of stages",
    "positions of microbatches",
    "documents in pairs",
    "documents of a stage",
    "a late layer looks ahead",
    "a lost expert",
    "saved in another order",
    "losses summed over context",
    "documents cut between context ranks",
    "rows of experts unordered",
]
"""Some faults of each kind: missing sums, wrong factors, shifted positions, leaks and losses."""


def check_found(names: list[str], processes: int, folder: Path) -> None:
    """Check that faults of cases with `processes` processes are found and named."""
    names = [name for name in names if FAULTS[name].case.processes == processes]
    ranks = run_processes(processes, PLANTED, "find", names=names, folder=str(folder))
    for name, *rank_lines in zip(names, *ranks, strict=True):
        fault = FAULTS[name]
        lines = [line.split("|") for lines_of_rank in rank_lines for line in lines_of_rank]
        assert any(
            check == fault.check
            and ratio == (fault.ratio or ratio)
            and fault.parameter in parameter
            for check, parameter, ratio, _ in lines
        ), (name, lines)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_planted_fault_of_each_kind_is_found(folder: Path, processes: int) -> None:
    """On each axis, and by each check that a fault can fail."""
    all_faults = FAULTS.values()
    assert {FAULTS[name].check for name in SAMPLE} == {fault.check for fault in all_faults}
    assert {FAULTS[name].case for name in SAMPLE} == {fault.case for fault in all_faults}
    check_found(SAMPLE, processes, folder)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_every_planted_fault_is_found(folder: Path, processes: int) -> None:
    """48 of 48, each with the right check."""
    assert len(FAULTS) == 48
    check_found(list(FAULTS), processes, folder)


def test_a_correct_model_holds_and_the_page_says_so() -> None:
    """Two processes with the simplest cases, and gradients of every weight are compared."""
    proof = prove("qwen3", processes=2, cases=3)
    assert proof.holds
    assert [outcome.refused for outcome in proof.outcomes] == [""] * 4
    weights = 2 + 4 * 11 + 1 - 1
    # Every data rank has the gradients of all weights.
    assert [outcome.compared for outcome in proof.outcomes] == [
        0 if outcome.case.text == "data=1" else weights * outcome.case.processes
        for outcome in proof.outcomes
    ]
    assert all(0 < outcome.apart < 1e-12 for outcome in proof.outcomes[3:])
    page = draw_page(proof)
    assert "qwen3: holds" in page
    assert page.count("<tr>") == 1 + len(proof.outcomes)


@pytest.mark.slow
def test_generation_is_probed_with_a_split_sequence() -> None:
    """Prompts of any length, on four processes that each hold a part of the sequence."""
    runs = Path(__file__).parent / "runs.py"
    assert run_processes(4, runs, "passed_probes", layout="tensor=4") == [["generation"]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [*architectures(), "Qwen3_5ForCausalLM", "GraniteMoeForCausalLM", "Phi3ForCausalLM"]
)
def test_every_shipped_family_holds(model: str) -> None:
    """On up to four processes, also for models built by transformers.

    Half of the cases have a pipeline, for which transformers publishes no plan of some models; some
    have a context axis, which transformers models do not support.
    """
    proof = prove(model, processes=4, cases=14)
    assert proof.holds, proof.smallest
    passed = [outcome for outcome in proof.outcomes if not outcome.refused]
    refused = [outcome.refused for outcome in proof.outcomes if outcome.refused]
    reasons = (
        "transformers has no pipeline plan",
        "a model of transformers computes its own positions",
    )
    assert len(passed) >= 8 or all(any(reason in text for reason in reasons) for text in refused), (
        refused
    )
    assert len(passed) >= 6
    assert all(outcome.compared for outcome in passed[1:])


def test_the_command_names_the_smallest_counterexample(tmp_path: Path) -> None:
    """For a custom module that ignores its documents: exit code 1, and a leak in one line."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Leaky(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)\n"
        "    def forward(self, tokens, *, documents=None):\n"
        "        return self.head(self.embed(tokens).cumsum(1))\n"
    )
    command = ["-m", "ms_parallel", "prove", "mine:Leaky", "--json"]
    ended = run_command([*command, "--processes", "1", "--cases", "1"], folder=tmp_path)
    assert ended.returncode == 1, ended.stderr
    proof = json.loads(ended.stdout)
    assert proof["outcomes"][0]["found"][0]["check"] == "leak"
    assert "changes with a token of another document" in ended.stdout


def test_an_unknown_model_is_refused_with_the_nearest() -> None:
    """No process is started for an unknown name."""
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        prove("lama")
    with pytest.raises(ConfigError, match="cannot be called"):
        prove("nowhere:nothing")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "gpt2"])
def test_a_transformers_model_is_shrunk_by_its_own_setting_names(name: str) -> None:
    """By class or type; GPT-2 calls its number of layers `n_layer`."""
    subject = open_subject(name)
    assert isinstance(subject.model, TransformersModel)
    assert subject.shrunk == "transformers' gpt2, 4 layers"
    assert subject.vocabulary == subject.model.vocab_size == 48
    assert subject.model.hidden_size == 32
    assert subject.model.document["n_head"] == 4


def test_a_model_that_cannot_run_does_not_hold() -> None:
    """Bloom adds position distances to its scores, so it is refused and nothing is proved."""
    proof = prove("BloomForCausalLM", processes=1, cases=1)
    assert not proof.holds
    assert proof.smallest is None
    assert "train this model with transformers" in proof.refused
    assert "BloomForCausalLM: is refused" in draw_page(proof)


def test_cases_are_seeded_and_start_with_the_simplest() -> None:
    """Cases are deterministic, and each axis occurs alone before it occurs with others."""
    cases = draw_cases(4, 30, 7)
    assert cases == draw_cases(4, 30, 7)
    assert cases != draw_cases(4, 30, 8)
    layouts = [case.layout for case in cases]
    for axis in ("data", "tensor", "pipeline"):
        first = layouts.index(f"{axis}=2")
        assert all(f"{axis}=2" not in layout for layout in layouts[:first])
    assert len(set(map(repr, cases))) == 30


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "import time; time.sleep(60)",
            "no case finished in 2 s and all ranks are idle: a deadlock",
        ),
        ("while True: pass", "no case finished in 3 CPU seconds"),
        ("import time; [time.sleep(0.01) for _ in range(250) if sum(range(200000))]", None),
    ],
    ids=["idle", "endless", "slow"],
)
def test_idle_and_endless_processes_are_stopped_but_slow_ones_are_not(
    code: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine does not produce a counterexample."""
    monkeypatch.setattr(launch, "STALL_S", 2.0)
    monkeypatch.setattr(launch, "CASE_CPU_S", 3.0)
    process = subprocess.Popen([sys.executable, "-c", code])
    job = Job(subject="", seed=0, tolerance=0.0, cases={})
    try:
        assert launch._wait([process], [tmp_path / "log.0"], job, tmp_path) == reason
    finally:
        process.kill()
        process.wait()
