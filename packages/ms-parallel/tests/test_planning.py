"""`ms-parallel plan`: plans fit into memory, are the best of all candidates, and train."""

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

pytestmark = pytest.mark.usefixtures("no_process_group")

GIB = 1 << 30
ONE_OF_ALL = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
"""Model sizes that no tensor or pipeline rank can split."""


def cluster(devices: int = 4, memory_gib: float = 1.0, **overrides: Any) -> Cluster:
    """Processes on this machine with made-up rates."""
    values = {
        "device": "cpu",
        "devices_per_node": devices,
        "memory_gib": memory_gib,
        "memory_bandwidth_gb_per_s": 10,
        "peak_tflops": {"float32": 0.05},
        "links": ClusterLinks(node=Link(latency_us=100, bandwidth_gb_per_s=1)),
    }
    return Cluster(**{**values, **overrides})


def options(**overrides: Any) -> Options:
    """Options of a run with a small model."""
    model = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    values = {"sequence_length": 64, "batch_size": 8, "device": "cpu", **overrides}
    return Options("llama", model_config={**model, **heads}, **values)


def test_plans_fit_into_memory_and_are_sorted_by_time() -> None:
    """A plan's memory is what its engines count, including the buffers of the loss."""
    run_options = options()
    planned = plan(run_options, cluster(memory_gib=0.02), best=4)
    times = [layout_plan.step.total for layout_plan in planned.best]
    assert times == sorted(times)
    assert len({str(layout_plan.layout) for layout_plan in planned.best}) == len(planned.best)
    for layout_plan in planned.best:
        assert layout_plan.peak_bytes <= planned.limit_bytes < 0.02 * GIB
        logits = layout_plan.settings["microbatch_size"] * 64 * 512 * 4
        split = Layout(**layout_plan.layout)
        loss_buffers = 2 * logits // (split.tensor * split.context)
        assert layout_plan.peak_bytes + loss_buffers <= 0.02 * GIB
        settings = Options("llama", **{**_model_settings(run_options), **layout_plan.settings})
        assert run_memory(settings, Layout(**layout_plan.layout)) == layout_plan.memory


def _model_settings(run_options: Options) -> dict[str, Any]:
    names = ("model_config", "sequence_length", "batch_size", "device")
    return {name: getattr(run_options, name) for name in names}


def test_with_less_memory_a_plan_holds_less() -> None:
    """If the fastest layout does not fit, a slower one is chosen and the reason reported."""
    rich = plan(options(), cluster(), best=1)
    tight = rich.best[0].peak_bytes * 0.6 / GIB
    poor = plan(options(), cluster(memory_gib=tight), best=1)
    assert poor.best[0].peak_bytes < 0.6 * rich.best[0].peak_bytes
    assert poor.best[0].step.total >= rich.best[0].step.total
    assert "does not fit into memory" in {out.reason for out in poor.fallen}


@pytest.mark.slow
def test_nothing_is_recomputed_with_enough_memory() -> None:
    """Only the least-memory objective then considers recomputation."""
    large_cluster = cluster(memory_gib=4.0)
    reason = "recomputes although memory suffices"
    fast = plan(options(), large_cluster, best=9, every=True)
    assert {layout_plan.settings["recompute"] for layout_plan in fast.best} == {"none"}
    assert reason in {out.reason for out in fast.fallen}
    least_memory = plan(options(), large_cluster, objective="least-memory")
    assert reason not in {out.reason for out in least_memory.fallen}


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_refused_with_the_memory_needed() -> None:
    """The one-line error also gives a number of devices that suffices."""
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


def test_explicit_settings_are_kept() -> None:
    """Settings that differ from their defaults are not changed by a plan."""
    run_options = options(recompute="full", schedule="gpipe", microbatch_size=2)
    assert set(explicit_settings(run_options)) == {"recompute", "schedule", "microbatch_size"}
    planned = plan(run_options, cluster(), best=3)
    for layout_plan in planned.best:
        assert layout_plan.settings["recompute"] == "full"
        assert layout_plan.settings["microbatch_size"] == 2


@pytest.mark.parametrize(
    "objective",
    [
        "cheapest",
        pytest.param("least-memory", marks=pytest.mark.slow),
        pytest.param("largest-model", marks=pytest.mark.slow),
    ],
)
def test_each_objective_is_met(objective: Any) -> None:
    """Fewest device seconds, least memory or most layers, not worse than in the fastest plan."""
    run_options, small_cluster = options(batch_size=4), cluster(memory_gib=0.005)
    fastest = plan(run_options, small_cluster, best=1)
    planned = plan(run_options, small_cluster, best=1, objective=objective)
    first, best = fastest.best[0], planned.best[0]
    match objective:
        case "cheapest":
            assert best.step.total * best.devices <= first.step.total * first.devices
        case "least-memory":
            assert best.peak_bytes <= first.peak_bytes
        case _:
            assert planned.parameters > fastest.parameters
            assert best.peak_bytes <= planned.limit_bytes


def test_the_largest_model_is_written_to_the_run_file(tmp_path: Path) -> None:
    """The run file has the planned number of layers and the model's other settings."""
    run = 'model = "llama"\ndataset = "stdlib"\nsteps = 2\nbatch_size = 4\nsequence_length = 16\n'
    model = "hidden_size = 32\nintermediate_size = 64\nvocab_size = 64\nnum_hidden_layers = 1\n"
    heads = "num_attention_heads = 2\nnum_key_value_heads = 2\n"
    (tmp_path / "run.toml").write_text(f"{run}[model_config]\n{model}{heads}")
    write_cluster(tmp_path / "c.toml", cluster(1, memory_gib=0.0015))
    plan_arguments = ["--cluster", tmp_path / "c.toml", "--objective", "largest-model", "--best", 1]
    output_arguments = [
        "--out",
        tmp_path / "planned.toml",
        "--set",
        f"output_dir={tmp_path / 'out'}",
    ]
    assert (
        main(["plan", *map(str, (tmp_path / "run.toml", *plan_arguments, *output_arguments))]) == 0
    )
    written = tomllib.loads((tmp_path / "planned.toml").read_text())["model_config"]
    stored = read_plan(tmp_path / "out" / FILE)
    assert stored is not None
    assert written["num_hidden_layers"] == stored.num_hidden_layers
    assert written["num_hidden_layers"] > 1
    assert written["hidden_size"] == 32


def test_a_correction_scales_all_parts_of_a_step() -> None:
    """Parts and total are scaled by the same factor."""
    step = PlannedStep(compute=3.0, bubble=1.0, data=0.5, optimizer=0.5, total=5.0)
    assert step.times(2.0) == PlannedStep(
        compute=6.0, bubble=2.0, data=1.0, optimizer=1.0, total=10.0
    )


@pytest.mark.parametrize(
    ("chip", "measured", "expected"),
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
def test_a_plan_names_the_chip_of_its_constants(
    chip: str,
    measured: bool,
    expected: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """For an unknown chip it also says what to set instead; measured rates need no constants."""
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
    if expected is None:
        assert (lines, constants) == ([], None)
        return
    (line,) = lines
    assert line.startswith(expected)
    assert constants["known"] == bool(chip)
    assert (constants["remedy"] is None) == bool(chip)
    if not chip:
        assert constants["chip"] == "h100-sxm"
        assert constants["remedy"] in line
        assert "doctor --measure" in line


@pytest.mark.parametrize("best", [0, -1])
def test_best_below_one_is_refused(best: int) -> None:
    """The message is not the one about a model that does not fit."""
    with pytest.raises(ConfigError, match=f"best must be at least 1 .*, got {best}"):
        plan(options(), cluster(), best=best)


@pytest.mark.slow
def test_offload_costs_the_time_of_its_copies() -> None:
    """The step takes longer by the time to copy the activations."""
    rates = {"float32": 10.0}
    gpu_cluster = cluster(1, device="cuda", peak_tflops=rates, memory_bandwidth_gb_per_s=1000)
    without = plan(
        options(microbatch_size=8, recompute="full", offload="moments"), gpu_cluster, best=1
    )
    with_offload = plan(
        options(microbatch_size=8, recompute="full", offload="all"), gpu_cluster, best=1
    )
    # Inputs of 4 layers, 8 rows of 64 positions and 64 features, out and back at 20 GB/s.
    inputs = 8 * 64 * 64 * 4 * 4
    assert with_offload.best[0].step.compute - without.best[0].step.compute == pytest.approx(
        2 * inputs / 20e9, rel=0.3
    )


def test_a_planned_run_file_trains(tmp_path: Path) -> None:
    """The command writes a run file for the processes of the cluster."""
    run = write_run(tmp_path / "run.toml", write_corpus(tmp_path / "corpus"), steps=2)
    machine = tmp_path / "cluster.toml"
    write_cluster(machine, cluster(2))
    out = tmp_path / "planned.toml"
    words = ["-m", "ms_parallel", "plan", str(run), "--cluster", str(machine), "--json"]
    result = run_command([*words, "--out", str(out)], environment=environment())
    assert result.returncode == 0, result.stderr
    planned_json = json.loads(result.stdout)
    planned = read_run_file(out)
    assert planned.options.parallel_config == Layout(**planned_json["best"][0]["layout"])
    stored = read_plan(planned.options.output_dir / FILE)
    assert stored is not None
    assert stored.best[0].layout == planned_json["best"][0]["layout"]
    trained = train(out, 2)
    assert trained.returncode == 0, trained.stderr
    assert len(events(run, "step")) == 2


def test_a_resumed_run_keeps_its_planned_layout(tmp_path: Path) -> None:
    """With layout = "auto", only the first start makes a plan."""
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
    assert {event["layout"] for event in events(run, "begin")} == {first["layout"]}
    other = train(run, 1)
    assert other.returncode == 2
    assert "describes 2 devices but 1 processes are running" in other.stderr


def test_plans_are_corrected_by_previous_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It reports their errors and scales times by measured over predicted time.

    Damaged plans and histories are named.
    """
    run_options, small_cluster = options(output_dir=tmp_path / "first"), cluster(2)
    before = plan(run_options, small_cluster, best=1)
    best = before.best[0]
    write_plan(tmp_path / "first" / FILE, before)
    lines = [{"kind": "begin", "layout": str(Layout(**best.layout))}]
    tokens = run_options.batch_size * run_options.sequence_length
    rate = tokens / (3 * best.step.total)
    lines += [{"kind": "step", "tokens": tokens, "rate_tokens_per_s": rate}] * MIN_STEPS
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "first" / "events.jsonl").write_text(text + '{"kind": "st')
    corrected = plan(options(output_dir=tmp_path / "second"), small_cluster, best=1)
    assert corrected.errors == pytest.approx([1 / 3 - 1])
    assert corrected.correction == pytest.approx(3)
    assert corrected.best[0].step.total == pytest.approx(3 * best.step.total)
    assert corrected.best[0].step.compute == pytest.approx(3 * best.step.compute)
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / FILE).write_text("{")
    learn(tmp_path)
    assert f"{tmp_path / 'third' / FILE}: " in caplog.text
    assert "not used to correct plans" in caplog.text
    shutil.rmtree(tmp_path / "first")
    history = learn(tmp_path)
    assert [entry.measured_s for entry in history.runs] == pytest.approx([3 * best.step.total])
    damaged = tmp_path / HISTORY
    damaged.write_bytes(damaged.read_bytes().replace(b"first", b"worst"))
    with pytest.raises(ConfigError, match="its checksum does not match; delete it to start over"):
        learn(tmp_path)


def test_layers_are_measured_on_this_machine() -> None:
    """More rows take longer, and recomputation makes backward passes longer, on this machine."""
    measured = plan(
        options(sequence_length=256, microbatch_size=8), cluster(1, measured=True), best=1
    )
    assert measured.times == "layers measured here"
    recomputed = options(sequence_length=256, microbatch_size=8, recompute="full")
    assert (
        plan(recomputed, cluster(1, measured=True), best=1).best[0].step.compute
        > measured.best[0].step.compute
    )


def test_pipeline_bubbles_follow_the_closed_formula() -> None:
    """1F1B with P ranks and M microbatches idles for P - 1 of M + P - 1, simulated or not."""
    even = StageSeconds(forward=(1.0,) * 4, backward_input=(1.0,) * 4, backward_weight=(1.0,) * 4)
    for microbatches, ranks in itertools.product((4, 8, 9, 40), (4,)):
        total = 3.0 * (microbatches + ranks - 1)
        assert makespan_s("1f1b", ranks, microbatches, even) == pytest.approx(total)
        share = bubble_share("1f1b", ranks, microbatches)
        assert share == pytest.approx((ranks - 1) / microbatches)


def test_collective_times_follow_latency_and_bandwidth() -> None:
    """A ring of n sends n - 1 chunks of 1/n; all-reduce is reduce-scatter plus all-gather."""
    small_cluster = cluster(4)
    gather = collective_s(small_cluster, "all_gather", 1e9, 4)
    assert gather == pytest.approx(3 * 100e-6 + 0.75)
    assert collective_s(small_cluster, "all_reduce", 1e9, 4) == pytest.approx(2 * gather)
    assert collective_s(small_cluster, "send", 0.5e9, 4) == pytest.approx(0.5 + 100e-6)
    assert collective_s(small_cluster, "all_reduce", 1e9, 1) == 0.0


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    """The checksum detects it, and the message gives the remedy."""
    path = tmp_path / FILE
    write_plan(path, plan(options(), cluster(2), best=1))
    content = path.read_bytes()
    assert read_plan(path) is not None
    path.write_bytes(content.replace(b'"fastest"', b'"Fastest"'))
    with pytest.raises(ConfigError, match="checksum does not match; restore it, or delete it"):
        read_plan(path)


def test_memory_of_many_shards_is_counted_exactly() -> None:
    """Memory on 64 data ranks equals the engine's, although the plan counts fewer shards."""
    rows = {"batch_size": 64, "microbatch_size": 1, "sequence_length": 63}  # nothing to split
    run_options = options(**rows, sharding="zero3")
    run_options = evolve(run_options, model_config={**run_options.model_config, **ONE_OF_ALL})
    best_plan = plan(run_options, cluster(64), best=1).best[0]
    assert best_plan.layout == {"data": 64}
    settings = Options("llama", **{**_model_settings(run_options), **best_plan.settings})
    for planned, counted in zip(
        best_plan.memory, run_memory(settings, Layout(data=64)), strict=True
    ):
        for part in ("weights", "gradients", "moments", "activations", "buffers"):
            # Shards of small weights are rounded up to full rows.
            assert getattr(planned, part) == pytest.approx(getattr(counted, part), abs=1 << 14)


def test_candidates_print_their_settings() -> None:
    """Settings that differ from the defaults, in one line."""
    split = Split(layout=Layout(data=2, pipeline=2), rows=1, microbatches=4)
    candidate = Candidate(
        split=split, schedule="zb-v", sharding="zero1", recompute="full", offload="none"
    )
    assert str(candidate) == "data=2,pipeline=2 rows=1 zb-v zero1 recompute=full"
    assert candidate.axes() == {"data": 2, "pipeline": 2}
