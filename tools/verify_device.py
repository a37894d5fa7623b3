"""Run all that has never run on this kind of device, and write a report to send back.

    python tools/verify_device.py --out report             # the machine's best accelerator
    python tools/verify_device.py --out report --quick     # without benchmarks and tests
    python tools/verify_device.py --out report --budget-s 600   # the most valuable parts first
    python tools/verify_device.py --out report --device cpu --quick

It needs a clone of the repository with the libraries installed in this Python, and no network. Each
part runs in a process of its own with a limit of time, so that one that hangs or dies costs only
itself. `report/report.md` is for people, `report/report.json` holds all that was printed. Nothing
but versions, the device's name and what the parts print is written; look before you send it.

With `--budget-s`, a part may take at most half of the time that is left, so that a slow one leaves
time for others; a part that this limit stops, and what needs it, count as not run.

Exit code 0 when all parts held, 1 when one did not or was not run, 2 where the device is not
there, 130 where it was stopped by Ctrl-C; the report then tells what had run.
"""

import argparse
import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from verify_inputs import write_inputs
from verify_report import Outcome, Report, facts

ROOT = Path(__file__).resolve().parents[1]
LEAST_S = 2.0
"""Seconds of the budget that starting another part needs."""
ENDING_S = 60.0
"""How long a part whose time is up has to end its own processes."""
TOLERANCE = 1e-3
"""How far a float32 loss on a device may be from the CPU's, relative: products of some devices
round their factors to 10 bits, whose relative error is 2**-11, and losses are means of many."""
EXPERTS = (
    *("--set", "model=qwen3_moe", "--set", "model_config.num_experts=4"),
    *("--set", "model_config.num_experts_per_tok=2"),
    *("--set", "model_config.moe_intermediate_size=64"),
)
KILLED = """
import os, signal, subprocess, sys, time
from pathlib import Path

run = subprocess.Popen(sys.argv[1:], start_new_session=True)
while run.poll() is None and not list(Path("killed").glob("checkpoints/*/*")):
    time.sleep(0.01)
print("it had ended before it was killed" if run.poll() is not None else "killed", flush=True)
try:
    os.killpg(run.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
run.wait()
sys.exit(subprocess.call(sys.argv[1:]))
"""
CPU, CPU_EXPERTS, TALKS, CPU_TUNING = (
    *("CPU, one process", "CPU, experts", "conversations", "CPU, tuning"),
)
"""Names of parts that others need."""
HIDDEN = ("env", "CUDA_VISIBLE_DEVICES=", "ASCEND_RT_VISIBLE_DEVICES=", "HIP_VISIBLE_DEVICES=")
"""Before a command, so that it finds no accelerator."""


class Part(NamedTuple):
    """Something that is run."""

    name: str
    words: tuple[str, ...]
    """The command."""
    limit_s: float
    shows: str = ""
    """What is proved where it holds."""
    losses: str = ""
    """The folder of the run whose losses are held against the CPU's; empty for none."""
    against: str = "cpu"
    """The folder of the CPU's run."""
    needs: tuple[str, ...] = ()
    """Parts that must have run before."""


def main() -> int:
    """Run every part and write the report."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python tools/verify_device.py --out report --quick",
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--device", help="such as npu, cuda or cpu; by default the best there is")
    parser.add_argument("--processes", type=int, default=0, help="by default all, at most 8")
    parser.add_argument("--quick", action="store_true", help="no benchmarks and no tests")
    parser.add_argument("--budget-s", type=positive, help="seconds for all parts together")
    options = parser.parse_args()
    device, count = device_of(options.device)
    if device is None:
        asked = options.device or "accelerator"
        sys.stderr.write(
            f"verify_device: torch finds no {asked} here; install the driver and the build of torch"
            " that belong to it, or give --device cpu to see how the script works\n"
        )
        return 2
    out: Path = options.out.resolve()
    shutil.rmtree(out / "work", ignore_errors=True)
    (out / "work" / "corpus").mkdir(parents=True)
    write_inputs(out / "work")
    processes = options.processes or min(8, count)
    parts = tuple(parts_of(device, processes, quick=options.quick))
    report = Report(
        out,
        facts(device, processes),
        planned=[part.name for part in parts],
        left_out=list(left_out(device, processes, quick=options.quick)),
        command=shlex.join(["python", "tools/verify_device.py", *sys.argv[1:]]),
        began=datetime.now(UTC),
    )
    try:
        run_parts(parts, report, out / "work", options.budget_s)
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")
        return 130
    finally:
        sys.stdout.write(f"{report.verdict()}\n")
        sys.stdout.write(f"send back {out / 'report.md'} and report.json beside it\n")
    return 0 if report.holds() else 1


def positive(text: str) -> float:
    """Parse a positive number of seconds."""
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(text)
    return seconds


def run_parts(
    parts: Sequence[Part], report: Report, place: Path, budget_s: float | None = None
) -> None:
    """Run parts in order, each reported as it ends, within `budget_s` seconds in all."""
    began_s = time.monotonic()
    skipped: set[str] = set()
    for number, part in enumerate(parts, 1):
        limited = part
        if budget_s is not None:
            left_s = budget_s - (time.monotonic() - began_s)
            if left_s < LEAST_S or skipped.intersection(part.needs):
                skipped.add(part.name)
                continue
            limited = part._replace(limit_s=min(part.limit_s, left_s / 2))
        sys.stdout.write(f"{number}/{len(parts)} {part.name} ... ")
        sys.stdout.flush()
        outcome = perform(limited, place)
        if outcome.code is None and limited.limit_s < part.limit_s:
            skipped.add(part.name)
            sys.stdout.write(f"not run: stopped after {limited.limit_s:.0f} s by --budget-s\n")
            continue
        report.add(outcome)
        sys.stdout.write(f"{'held' if outcome.held else 'DID NOT HOLD'}\n")


def device_of(asked: str | None) -> tuple[str | None, int]:
    """Give the device to verify and how many there are; None where it is not there."""
    import torch

    if asked == "cpu":
        return "cpu", 2
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or (asked and asked != found.type):
        return None, 0
    return found.type, torch.accelerator.device_count()


def parts_of(device: str, processes: int, *, quick: bool) -> Iterator[Part]:
    """Everything to run: what others need first, then what says most in the least time."""
    python = sys.executable
    tool = driver_tool(device)
    if tool:
        yield Part("what the driver says", tool, 60, "driver and devices")
    if is_here("ms_profile"):
        doctor = (python, "-m", "ms_profile", "doctor")
        shows = "versions, devices, memory, and what may be wrong with them"
        yield Part("doctor", doctor, 300, shows)
    check = (python, "-m", "ms_kernels", "check", "--device", device)
    shows = "each backend, forward and backward, within its limit of error"
    yield Part("operators beside float64", check, 3600, shows)
    yield from training_parts(device)
    if is_here("ms_align"):
        yield from aligning_parts(device)
    if is_here("ms_compress"):
        words = (python, "-m", "ms_compress", "qat", "rounded.toml")
        yield Part(
            f"{device}, rounded weights",
            words,
            900,
            "training with rounded weights ends",
            needs=(CPU,),
        )
    if is_here("ms_profile"):
        yield from recording_parts(device, processes)
    yield from layout_parts(device, processes)
    if quick:
        return
    if is_here("pytest"):
        for package in sorted(path.name for path in (ROOT / "packages").iterdir()):
            words = (python, "-m", "pytest", "-q", "-m", "gpu", f"{ROOT}/packages/{package}/tests")
            yield Part(f"tests of {package}", words, 3600, "tests that need a device")
    if device != "cpu":
        for script in sorted(ROOT.glob("packages/*/benchmarks/gpu.py")):
            out = ("--out", "figures.md") if "ms-kernels" in script.parts else ()
            name = f"figures of {script.parts[-3]}"
            yield Part(name, (python, str(script), *out), 7200, "speed")


def left_out(device: str, processes: int, *, quick: bool) -> Iterator[str]:
    """What is not run, and why."""
    if device != "cpu" and driver_tool(device) is None:
        yield "what the driver says: its command is not found"
    for module in ("ms_align", "ms_compress", "ms_profile"):
        if not is_here(module):
            yield f"parts of {module.replace('_', '-')}: it is not installed"
    if processes < 2:
        yield "every layout and the links: there is one device"
    elif processes < 8:
        yield f"layouts of more than {processes} devices: there are no more"
    if quick:
        yield "tests that need a device, and figures: --quick"
    elif not is_here("pytest"):
        yield "tests that need a device: pytest is not installed"
    if device == "cpu" and not quick:
        yield "figures: they need an accelerator"


def is_here(module: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


def driver_tool(device: str) -> tuple[str, ...] | None:
    """The driver's own command that tells of its devices."""
    tool = {"npu": ("npu-smi", "info"), "cuda": ("nvidia-smi",)}.get(device)
    return tool if tool and shutil.which(tool[0]) else None


def training_parts(device: str) -> Iterator[Part]:
    """Training in one process, whole and killed, dense and of experts."""
    base = "the losses that others are held against"
    yield Part(CPU, train(1, "cpu", "cpu"), 900, base, "cpu")
    shows = f"losses of six steps, within {TOLERANCE:g} of the CPU's"
    yield Part(f"{device}, one process", train(1, device, "one"), 900, shows, "one", needs=(CPU,))
    half = (*train(1, device, "half"), "--set", "mixed_precision=true")
    yield Part(
        f"{device}, bfloat16", half, 900, "half precision: finite losses", "half", "half", (CPU,)
    )
    kernels = (*train(1, device, "kernels"), "--set", "ops=ms_kernels")
    yield Part(
        f"{device}, ms-kernels", kernels, 900, f"our operators: {shows}", "kernels", needs=(CPU,)
    )
    often = ("--set", "checkpoint_every=1")
    killed = (sys.executable, "-c", KILLED, *train(1, device, "killed"), *often)
    name = f"{device}, killed and gone on with"
    yield Part(
        name, killed, 900, "after kill -9 the losses of an undisturbed run", "killed", needs=(CPU,)
    )
    ours = "cpu-experts"
    yield Part(CPU_EXPERTS, (*train(1, "cpu", ours), *EXPERTS), 900, base, ours, ours, (CPU,))
    one = (*train(1, device, "experts"), *EXPERTS)
    yield Part(
        f"{device}, experts",
        one,
        900,
        f"a mixture of experts: {shows}",
        "experts",
        ours,
        (CPU_EXPERTS,),
    )


def layout_parts(device: str, processes: int) -> Iterator[Part]:
    """Training on every axis, against one process on the CPU."""
    shows = f"losses of six steps, within {TOLERANCE:g} of the CPU's"
    for axes in layouts(processes):
        name = ", ".join(f"{axis}={ranks}" for axis, ranks in axes.items())
        ranks = math.prod(n for axis, n in axes.items() if axis != "expert")
        sets = [part for axis, n in axes.items() for part in ("--set", f"layout.{axis}={n}")]
        more = EXPERTS if "expert" in axes else ()
        words = (*train(ranks, device, "-".join(axes)), *sets, *more)
        against = "cpu-experts" if more else "cpu"
        needs = (CPU_EXPERTS,) if more else (CPU,)
        proves = f"collectives of {ranks} processes: {shows}"
        yield Part(f"{device}, {name}", words, 900, proves, "-".join(axes), against, needs)


def layouts(processes: int) -> Iterator[dict[str, int]]:
    """Every axis by itself, and products of two and three where there are devices for them."""
    if processes > 1:
        yield {"data": processes - processes % 2}
        for axis in ("tensor", "pipeline", "context"):
            yield {axis: 2}
        yield {"data": 2, "expert": 2}
    if processes > 3:
        for axis in ("tensor", "pipeline", "context"):
            yield {"data": 2, axis: 2}
        yield {"pipeline": 2, "tensor": 2}
    if processes > 7:
        yield {"data": 2, "pipeline": 2, "tensor": 2}


def aligning_parts(device: str) -> Iterator[Part]:
    """Tuning beside the CPU's, and rollouts with updates of PPO."""
    python = sys.executable
    build = ("--tokenizer", "cpu/tokenizer.json", "--chat-template", "chat.jinja", "--out", "chats")
    words = (python, "-m", "ms_data", "build", "chats.jsonl", *build)
    yield Part(TALKS, words, 300, "the data of tuning", needs=(CPU,))
    tune = (python, "-m", "ms_align", "sft", "tuning.toml")
    ours = "cpu-tuning"
    words = (*HIDDEN, *tune, "--set", f"output_dir={ours}")
    yield Part(
        CPU_TUNING, words, 900, "the losses that tuning is held against", ours, ours, (TALKS,)
    )
    shows = f"losses of six steps, within {TOLERANCE:g} of the CPU's"
    yield Part(f"{device}, tuning", tune, 900, shows, "tuning", ours, (CPU_TUNING,))
    ppo = (python, "-m", "ms_align", "ppo", "ppo.toml")
    shows = "rollouts, rewards and updates: finite losses"
    yield Part(f"{device}, PPO", ppo, 900, shows, "ppo", "ppo", (TALKS,))


def recording_parts(device: str, processes: int) -> Iterator[Part]:
    """A script recorded, its report, and what the links between devices give."""
    profile = (sys.executable, "-m", "ms_profile")
    record = ("--train-script", "layers.py", "--output-dir", "recorded", "--overwrite")
    yield Part(f"{device}, recorded", (*profile, "run", *record), 600, "a script is recorded")
    report = (*profile, "report", "recorded")
    recorded = f"{device}, recorded"
    yield Part("report", report, 600, "the device's own trace is read", needs=(recorded,))
    backend = {"npu": "hccl", "cuda": "nccl"}.get(device, "gloo")
    if processes > 1:
        link = ("link", "--nproc-per-node", str(processes), "--backend", backend)
        yield Part(f"links, {backend}", (*profile, *link), 600, "rates between devices")


def train(processes: int, device: str, folder: str) -> tuple[str, ...]:
    """The command of a run of a small model; one dataset serves all."""
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    run = ("-m", "ms_parallel", "train", "run.toml")
    into = ("--set", f"device={device}", "--set", f"output_dir={folder}")
    return (sys.executable, *(launch if processes > 1 else ()), *run, *into)


def perform(part: Part, place: Path) -> Outcome:
    """Run a part, and hold its losses against the CPU's."""
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    code, printed = run(part, place, environment)
    output = printed.decode(errors="replace")
    # pytest ends with 5 where a package has no test that needs a device.
    held, note = code == 0 or (code == 5 and "pytest" in part.words), ""
    if held and part.losses:
        held, note = compare(place, part.losses, part.against)
    elif not held:
        note = f"ended with code {code}" if code is not None else f"not done in {part.limit_s:g} s"
    return Outcome(
        part.name, part.shows, held, round(time.monotonic() - started, 1), code, output, note
    )


def run(part: Part, place: Path, environment: Mapping[str, str]) -> tuple[int | None, bytes]:
    """Give a part's exit code, None where its time was up, and what it printed."""
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            part.words, cwd=place, env=environment, stdout=printed, stderr=subprocess.STDOUT
        )
        code: int | None = None
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its workers, which would hold the device
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        printed.seek(0)
        return code, printed.read()


def compare(place: Path, folder: str, against: str = "cpu") -> tuple[bool, str]:
    """Hold a run's losses against those of the CPU."""
    ours, theirs = losses_of(place / folder), losses_of(place / against)
    if not ours or len(ours) != len(theirs):
        return False, f"{len(ours)} losses, and the CPU has {len(theirs)}"
    if not all(map(math.isfinite, [*ours, *theirs])):
        return False, "a loss is not finite"
    if folder == against:
        return True, f"{len(ours)} losses, all finite"
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return worst <= TOLERANCE, f"losses differ from the CPU's by {worst:.1e} at most"


def losses_of(folder: Path) -> list[float]:
    """The losses of a run's steps, in order; NaN where one was not finite, which is null there.

    A step that a killed run did not save is done twice, and its last loss counts.
    """
    events = [
        json.loads(line)
        for path in sorted(folder.glob("events*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    losses = {event["step"]: event["loss"] for event in events if event.get("kind") == "step"}
    return [math.nan if loss is None else float(loss) for loss in losses.values()]


if __name__ == "__main__":
    sys.exit(main())
