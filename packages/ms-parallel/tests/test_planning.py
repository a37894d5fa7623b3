"""`ms-parallel plan`: what it finds fits, is the best of all that there are, and trains."""

import itertools
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from launching import environment, events, train, write_corpus, write_run
from processes import run_command

from ms_parallel.cli import main
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import Cluster, ClusterLinks, Link, write_cluster
from ms_parallel.planner.layouts.candidate import Candidate, Split
from ms_parallel.planner.layouts.pipeline import StageSeconds, bubble_share, makespan_s
from ms_parallel.planner.record.history import FILE as HISTORY
from ms_parallel.planner.record.history import MIN_STEPS, learn
from ms_parallel.planner.record.plan_file import FILE, PlannedStep, read_plan, write_plan
from ms_parallel.planner.roofline.collectives import collective_s
from ms_parallel.run_file import read_run_file
from ms_parallel.training.memory import run_memory
from ms_parallel.training.options import Options
from ms_parallel.training.planning.conditions import explicit_settings
from ms_parallel.training.planning.plan import plan

GIB = 1 << 30
ONE_OF_ALL = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
"""What no tensor or pipeline rank can split."""


def cluster(devices: int = 4, memory_gib: float = 1.0, **more: Any) -> Cluster:
    """Processes on this machine, of made-up rates."""
    values = {
        "device": "cpu",
        "devices_per_node": devices,
        "memory_gib": memory_gib,
        "memory_bandwidth_gb_per_s": 10,
        "peak_tflops": {"float32": 0.05},
        "links": ClusterLinks(node=Link(latency_us=100, bandwidth_gb_per_s=1)),
    }
    return Cluster(**{**values, **more})


def options(**more: Any) -> Options:
    """A small model."""
    model = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    values = {"sequence_length": 64, "batch_size": 8, "device": "cpu", **more}
    return Options("llama", model_config={**model, **heads}, **values)


def test_what_is_planned_fits_and_the_best_comes_first() -> None:
    """Each holds what its engines count, which is within the memory, and none is faster above."""
    asked = options()
    found = plan(asked, cluster(memory_gib=0.02), best=4)
    times = [each.step.total for each in found.best]
    assert times == sorted(times)
    assert len({str(each.layout) for each in found.best}) == len(found.best)
    for each in found.best:
        assert each.peak_bytes <= found.limit_bytes < 0.02 * GIB
        logits = each.settings["microbatch_size"] * 64 * 512 * 4
        split = Layout(**each.layout)
        beside = 2 * logits // (split.tensor * split.context)  # what the loss works in
        assert each.peak_bytes + beside <= 0.02 * GIB
        settings = Options("llama", **{**_kept(asked), **each.settings})
        assert run_memory(settings, Layout(**each.layout)) == each.memory


def _kept(asked: Options) -> dict[str, Any]:
    names = ("model_config", "sequence_length", "batch_size", "device")
    return {name: getattr(asked, name) for name in names}


def test_less_memory_is_met_by_holding_less() -> None:
    """Where the fastest does not fit, a slower one that does is chosen, and the reason is told."""
    rich = plan(options(), cluster(), best=1)
    tight = rich.best[0].peak_bytes * 0.6 / GIB
    poor = plan(options(), cluster(memory_gib=tight), best=1)
    assert poor.best[0].peak_bytes < 0.6 * rich.best[0].peak_bytes
    assert poor.best[0].step.total >= rich.best[0].step.total
    assert "does not fit into memory" in {out.reason for out in poor.fallen}


def test_nothing_is_computed_again_where_there_is_room() -> None:
    """What keeps all is faster, so no other is looked at; where least is asked for, all are."""
    room = cluster(memory_gib=4.0)
    reason = "recomputes although memory suffices"
    fast = plan(options(), room, best=9, every=True)
    assert {each.settings["recompute"] for each in fast.best} == {"none"}
    assert reason in {out.reason for out in fast.fallen}
    least = plan(options(), room, objective="least-memory")
    assert reason not in {out.reason for out in least.fallen}


def test_a_cluster_that_holds_no_layout_is_told_what_would() -> None:
    """One line names the least that a device would need, and how many of these would do."""
    with pytest.raises(
        ConfigError, match=r"the smallest, .* needs .* GiB per device; use"
    ) as raised:
        plan(
            options(),
            cluster(
                devices=1,
                memory_gib=0.001,
                links=ClusterLinks(network=Link(latency_us=1, bandwidth_gb_per_s=1)),
            ),
        )
    assert "\n" not in str(raised.value)


def test_what_the_run_file_gives_is_kept() -> None:
    """A setting that is not what it is by default is not chosen."""
    asked = options(recompute="full", schedule="gpipe", microbatch_size=2)
    assert set(explicit_settings(asked)) == {"recompute", "schedule", "microbatch_size"}
    found = plan(asked, cluster(), best=3)
    for each in found.best:
        assert each.settings["recompute"] == "full"
        assert each.settings["microbatch_size"] == 2


@pytest.mark.parametrize(
    "objective", ["cheapest", "least-memory", pytest.param("largest-model", marks=pytest.mark.slow)]
)
def test_each_objective_is_met(objective: Any) -> None:
    """Fewest device seconds, least memory, most layers: none of them worse than the fastest's."""
    asked, here = options(batch_size=4), cluster(memory_gib=0.005)
    fastest = plan(asked, here, best=1)
    found = plan(asked, here, best=1, objective=objective)
    first, best = fastest.best[0], found.best[0]
    match objective:
        case "cheapest":
            assert best.step.total * best.devices <= first.step.total * first.devices
        case "least-memory":
            assert best.peak_bytes <= first.peak_bytes
        case _:
            assert found.parameters > fastest.parameters
            assert best.peak_bytes <= found.limit_bytes


def test_the_largest_model_is_the_one_that_is_written(tmp_path: Path) -> None:
    """The run file has the layers that were found, beside what it said of the model before."""
    run = 'model = "llama"\ndataset = "stdlib"\nsteps = 2\nbatch_size = 4\nsequence_length = 16\n'
    model = "hidden_size = 32\nintermediate_size = 64\nvocab_size = 64\nnum_hidden_layers = 1\n"
    heads = "num_attention_heads = 2\nnum_key_value_heads = 2\n"
    (tmp_path / "run.toml").write_text(f"{run}[model_config]\n{model}{heads}")
    write_cluster(tmp_path / "c.toml", cluster(1, memory_gib=0.0015))
    asked = ["--cluster", tmp_path / "c.toml", "--objective", "largest-model", "--best", 1]
    wanted = ["--out", tmp_path / "planned.toml", "--set", f"output_dir={tmp_path / 'out'}"]
    assert main(["plan", *map(str, (tmp_path / "run.toml", *asked, *wanted))]) == 0
    written = tomllib.loads((tmp_path / "planned.toml").read_text())["model_config"]
    found = read_plan(tmp_path / "out" / FILE)
    assert found is not None
    assert written["num_hidden_layers"] == found.num_hidden_layers
    assert written["num_hidden_layers"] > 1
    assert written["hidden_size"] == 32


def test_the_parts_of_a_corrected_step_are_corrected_too() -> None:
    """They still make up the whole."""
    step = PlannedStep(compute=3.0, bubble=1.0, data=0.5, optimizer=0.5, total=5.0)
    assert step.times(2.0) == PlannedStep(
        compute=6.0, bubble=2.0, data=1.0, optimizer=1.0, total=10.0
    )


@pytest.mark.parametrize(
    ("chip", "measured", "says"),
    [
        ('chip = "h200"\n', False, "constants  efficiency of h200 in published runs"),
        (
            "",
            False,
            "constants  efficiency of h100-sxm, the chip with the closest rates, as the cluster",
        ),
        ("", True, None),
    ],
)
def test_a_plan_says_whose_constants_it_is_made_with(
    chip: str, measured: bool, says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where no known chip is named, what to give instead; none where rates were measured."""
    run = 'model = "llama"\ndataset = "stdlib"\nsteps = 2\nbatch_size = 4\nsequence_length = 16\n'
    (tmp_path / "run.toml").write_text(run + f'output_dir = "{tmp_path / "runs" / "it"}"\n')
    figures = "memory_gib = 80\nmemory_bandwidth_gb_per_s = 3300\ndevices_per_node = 1\n"
    rates = "[peak_tflops]\nbfloat16 = 950\nfloat32 = 60\n"
    text = f"{chip}{figures}measured = {str(measured).lower()}\n{rates}"
    (tmp_path / "c.toml").write_text(text)
    words = ["plan", str(tmp_path / "run.toml"), "--cluster", str(tmp_path / "c.toml")]
    assert main([*words, "--best", "1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("constants")]
    assert main([*words, "--best", "1", "--json"]) == 0
    constants = json.loads(capsys.readouterr().out)["constants"]
    if says is None:
        assert (lines, constants) == ([], None)
        return
    (line,) = lines
    assert line.startswith(says)
    assert constants["known"] == bool(chip)
    assert (constants["remedy"] is None) == bool(chip)
    if not chip:
        assert constants["chip"] == "h100-sxm"
        assert constants["remedy"] in line
        assert "doctor --measure" in line


@pytest.mark.parametrize("best", [0, -1])
def test_no_layouts_to_find_are_refused_as_such(best: int) -> None:
    """Not with the words for a model that does not fit: this one does."""
    with pytest.raises(ConfigError, match=f"best must be at least 1 .*, got {best}"):
        plan(options(), cluster(), best=best)


def test_what_is_offloaded_costs_its_copies() -> None:
    """A run that is told to offload activations takes as much longer as they take to copy."""
    rates = {"float32": 10.0}
    here = cluster(1, device="cuda", peak_tflops=rates, memory_bandwidth_gb_per_s=1000)
    stays = plan(options(microbatch_size=8, recompute="full", offload="moments"), here, best=1)
    leaves = plan(options(microbatch_size=8, recompute="full", offload="all"), here, best=1)
    # 8 rows of 64 positions and 64 numbers before each of 4 layers, there and back at 20 GB/s.
    inputs = 8 * 64 * 64 * 4 * 4
    assert leaves.best[0].step.compute - stays.best[0].step.compute == pytest.approx(
        2 * inputs / 20e9, rel=0.3
    )


def test_a_planned_run_file_trains(tmp_path: Path) -> None:
    """The command writes a run file for the processes of the cluster, which they can run."""
    run = write_run(tmp_path / "run.toml", write_corpus(tmp_path / "corpus"), steps=2)
    machine = tmp_path / "cluster.toml"
    write_cluster(machine, cluster(2))
    out = tmp_path / "planned.toml"
    words = ["-m", "ms_parallel", "plan", str(run), "--cluster", str(machine), "--json"]
    done = run_command([*words, "--out", str(out)], environment=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    planned = read_run_file(out)
    assert planned.options.parallel_config == Layout(**found["best"][0]["layout"])
    stored = read_plan(planned.options.output_dir / FILE)
    assert stored is not None
    assert stored.best[0].layout == found["best"][0]["layout"]
    trained = train(out, 2)
    assert trained.returncode == 0, trained.stderr
    assert len(events(run, "step")) == 2


def test_a_run_keeps_the_layout_that_was_chosen_when_it_began(tmp_path: Path) -> None:
    """`auto` plans for the processes that there are; a run that goes on does not plan again."""
    machine = tmp_path / "cluster.toml"
    write_cluster(machine, cluster(2))
    run = write_run(
        tmp_path / "run.toml",
        write_corpus(tmp_path / "corpus"),
        steps=2,
        layout="auto",
        cluster=str(machine),
    )
    assert train(run, 2).returncode == 0
    assert train(run, 2, "--set", "steps=4").returncode == 0
    first, second = events(run, "plan")
    assert (first["kept"], second["kept"]) == (0, 1)
    assert first["layout"] == second["layout"]
    assert {each["layout"] for each in events(run, "begin")} == {first["layout"]}
    other = train(run, 1)
    assert other.returncode == 2
    assert "describes 2 devices but 1 processes are running" in other.stderr


def test_a_plan_learns_from_the_runs_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It states their errors, and multiplies times by what they took over what was predicted.

    A plan that is damaged is named.
    """
    asked, here = options(output_dir=tmp_path / "first"), cluster(2)
    before = plan(asked, here, best=1)
    best = before.best[0]
    write_plan(tmp_path / "first" / FILE, before)
    lines = [{"kind": "begin", "layout": str(Layout(**best.layout))}]
    tokens = asked.batch_size * asked.sequence_length
    rate = tokens / (3 * best.step.total)
    lines += [{"kind": "step", "tokens": tokens, "rate_tokens_per_s": rate}] * MIN_STEPS
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "first" / "events.jsonl").write_text(text + '{"kind": "st')
    again = plan(options(output_dir=tmp_path / "second"), here, best=1)
    assert again.errors == pytest.approx([1 / 3 - 1])
    assert again.correction == pytest.approx(3)
    assert again.best[0].step.total == pytest.approx(3 * best.step.total)
    assert again.best[0].step.compute == pytest.approx(3 * best.step.compute)
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / FILE).write_text("{")
    learn(tmp_path)
    assert f"{tmp_path / 'third' / FILE}: " in caplog.text
    assert "not used to correct plans" in caplog.text
    shutil.rmtree(tmp_path / "first")
    kept = learn(tmp_path)
    assert [each.measured_s for each in kept.runs] == pytest.approx([3 * best.step.total])
    damaged = tmp_path / HISTORY
    damaged.write_bytes(damaged.read_bytes().replace(b"first", b"worst"))
    with pytest.raises(ConfigError, match="its checksum does not match; delete it to start over"):
        learn(tmp_path)


def test_layers_are_measured_where_the_device_is() -> None:
    """More rows take longer, and recomputation makes backwards longer; by this machine's clock."""
    found = plan(options(sequence_length=256, microbatch_size=8), cluster(1, measured=True), best=1)
    assert found.times == "layers measured here"
    again = options(sequence_length=256, microbatch_size=8, recompute="full")
    assert (
        plan(again, cluster(1, measured=True), best=1).best[0].step.compute
        > found.best[0].step.compute
    )


def test_a_pipeline_waits_as_closed_formulas_say() -> None:
    """1F1B of P ranks and M microbatches waits P - 1 of M + P - 1, also beyond what is played."""
    even = StageSeconds(forward=(1.0,) * 4, backward_input=(1.0,) * 4, backward_weight=(1.0,) * 4)
    for microbatches, ranks in itertools.product((4, 8, 9, 40), (4,)):
        whole = 3.0 * (microbatches + ranks - 1)
        assert makespan_s("1f1b", ranks, microbatches, even) == pytest.approx(whole)
        share = bubble_share("1f1b", ranks, microbatches)
        assert share == pytest.approx((ranks - 1) / microbatches)


def test_collectives_take_latency_and_size() -> None:
    """A ring of n sends n - 1 parts of 1/n; an all-reduce is a reduce-scatter and an all-gather."""
    here = cluster(4)
    gather = collective_s(here, "all_gather", 1e9, 4)
    assert gather == pytest.approx(3 * 100e-6 + 0.75)
    assert collective_s(here, "all_reduce", 1e9, 4) == pytest.approx(2 * gather)
    assert collective_s(here, "send", 0.5e9, 4) == pytest.approx(0.5 + 100e-6)
    assert collective_s(here, "all_reduce", 1e9, 1) == 0.0


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    """Its digest tells; the line says what to do."""
    path = tmp_path / FILE
    write_plan(path, plan(options(), cluster(2), best=1))
    content = path.read_bytes()
    assert read_plan(path) is not None
    path.write_bytes(content.replace(b'"fastest"', b'"Fastest"'))
    with pytest.raises(ConfigError, match="checksum does not match; restore it, or delete it"):
        read_plan(path)


def test_many_shards_are_counted_as_few() -> None:
    """Each of 64 data ranks holds what an engine of 64 counts, whether or not few stand for it."""
    rows = {"batch_size": 64, "microbatch_size": 1, "sequence_length": 63}  # which none can split
    asked = options(**rows, sharding="zero3")
    asked = evolve(asked, model_config={**asked.model_config, **ONE_OF_ALL})
    found = plan(asked, cluster(64), best=1).best[0]
    assert found.layout == {"data": 64}
    settings = Options("llama", **{**_kept(asked), **found.settings})
    for planned, counted in zip(found.memory, run_memory(settings, Layout(data=64)), strict=True):
        for part in ("weights", "gradients", "moments", "activations", "buffers"):
            # Shares of small weights are rounded up to whole rows of each.
            assert getattr(planned, part) == pytest.approx(getattr(counted, part), abs=1 << 14)


def test_candidates_say_what_they_are() -> None:
    """In a line that names what differs from nothing at all."""
    split = Split(layout=Layout(data=2, pipeline=2), rows=1, microbatches=4)
    one = Candidate(
        split=split, schedule="zb-v", sharding="zero1", recompute="full", offload="none"
    )
    assert str(one) == "data=2,pipeline=2 rows=1 zb-v zero1 recompute=full"
    assert one.axes() == {"data": 2, "pipeline": 2}
