"""Run all that has never run on this kind of device, and write a report to send back.

    python tools/verify_device.py --out report             # the machine's best accelerator
    python tools/verify_device.py --out report --quick     # without benchmarks and tests
    python tools/verify_device.py --out report --device cpu --quick

It needs a clone of the repository with the libraries installed in this Python, and no network. Each
part runs in a process of its own with a limit of time, so that one that hangs or dies costs only
itself. `report/report.md` is for people, `report/report.json` holds all that was printed. Nothing
but versions, the device's name and what the parts print is written; look before you send it.

Exit code 0 when all parts held, 1 when one did not, 2 where the device is not there.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from verify_inputs import write_inputs

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "torch_npu", "triton", "triton-ascend", "numpy", "transformers"),
    *("ms-data", "ms-kernels", "ms-parallel", "ms-align", "ms-compress", "ms-profile"),
)
SHOWN = 3000
"""Characters of what a part printed that the page shows."""
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
HIDDEN = ("env", "CUDA_VISIBLE_DEVICES=", "ASCEND_RT_VISIBLE_DEVICES=", "HIP_VISIBLE_DEVICES=")
"""Before a command, so that it finds no accelerator."""


class Part(NamedTuple):
    """Something that is run."""

    name: str
    words: tuple[str, ...]
    """The command."""
    limit_s: float
    losses: str = ""
    """The folder of the run whose losses are held against the CPU's; empty for none."""
    against: str = "cpu"
    """The folder of the CPU's run."""


class Outcome(NamedTuple):
    """What came of a part."""

    name: str
    held: bool
    seconds: float
    code: int | None
    """Its exit code; None where its time was up."""
    output: str
    note: str


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
    outcomes: list[Outcome] = []
    for part in parts_of(device, processes, quick=options.quick):
        sys.stdout.write(f"{part.name} ... ")
        sys.stdout.flush()
        outcomes.append(perform(part, out / "work"))
        sys.stdout.write(f"{'held' if outcomes[-1].held else 'DID NOT HOLD'}\n")
        write_report(out, device, processes, outcomes)
    sys.stdout.write(f"wrote {out / 'report.md'}\n")
    return 0 if all(each.held for each in outcomes) else 1


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
    """Everything to run, what others need first."""
    python = sys.executable
    tool = {"npu": ("npu-smi", "info"), "cuda": ("nvidia-smi",)}.get(device)
    if tool and shutil.which(tool[0]):
        yield Part("what the driver says", tool, 60)
    yield Part("doctor", (python, "-m", "ms_parallel", "doctor", "--json"), 300)
    yield from training_parts(device, processes)
    if importlib.util.find_spec("ms_align"):
        yield from aligning_parts(device)
    if importlib.util.find_spec("ms_compress"):
        words = (python, "-m", "ms_compress", "qat", "rounded.toml")
        yield Part(f"{device}, rounded weights", words, 900)
    if importlib.util.find_spec("ms_profile"):
        yield from recording_parts(device, processes)
    check = (python, "-m", "ms_kernels", "check", "--device", device, "--json")
    yield Part("operators beside float64", check, 3600)
    if quick:
        return
    if importlib.util.find_spec("pytest"):
        for package in sorted(path.name for path in (ROOT / "packages").iterdir()):
            words = (python, "-m", "pytest", "-q", "-m", "gpu", f"{ROOT}/packages/{package}/tests")
            yield Part(f"tests of {package}", words, 3600)
    if device != "cpu":
        for script in sorted(ROOT.glob("packages/*/benchmarks/gpu.py")):
            out = ("--out", "figures.md") if "ms-kernels" in script.parts else ()
            yield Part(f"figures of {script.parts[-3]}", (python, str(script), *out), 7200)


def training_parts(device: str, processes: int) -> Iterator[Part]:
    """Training in one process and on every axis, whole and killed, dense and of experts."""
    yield Part("CPU, one process", train(1, "cpu", "cpu"), 900, "cpu")
    yield Part(f"{device}, one process", train(1, device, "one"), 900, "one")
    half = ("--set", "mixed_precision=true")
    yield Part(f"{device}, bfloat16", (*train(1, device, "half"), *half), 900)
    kernels = ("--set", "ops=ms_kernels")
    yield Part(f"{device}, ms-kernels", (*train(1, device, "kernels"), *kernels), 900, "kernels")
    often = ("--set", "checkpoint_every=1")
    killed = (sys.executable, "-c", KILLED, *train(1, device, "killed"), *often)
    yield Part(f"{device}, killed and gone on with", killed, 900, "killed")
    ours = "cpu-experts"
    yield Part("CPU, experts", (*train(1, "cpu", ours), *EXPERTS), 900, ours, ours)
    one = (*train(1, device, "experts"), *EXPERTS)
    yield Part(f"{device}, experts", one, 900, "experts", ours)
    for axes in layouts(processes):
        name = ", ".join(f"{axis}={ranks}" for axis, ranks in axes.items())
        ranks = math.prod(n for axis, n in axes.items() if axis != "expert")
        sets = [part for axis, n in axes.items() for part in ("--set", f"layout.{axis}={n}")]
        more = EXPERTS if "expert" in axes else ()
        words = (*train(ranks, device, "-".join(axes)), *sets, *more)
        yield Part(f"{device}, {name}", words, 900, "-".join(axes), ours if more else "cpu")


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
    yield Part("conversations", (python, "-m", "ms_data", "build", "chats.jsonl", *build), 300)
    tune = (python, "-m", "ms_align", "sft", "tuning.toml")
    ours = ("--set", "output_dir=cpu-tuning")
    yield Part("CPU, tuning", (*HIDDEN, *tune, *ours), 900, "cpu-tuning", "cpu-tuning")
    yield Part(f"{device}, tuning", tune, 900, "tuning", "cpu-tuning")
    yield Part(f"{device}, PPO", (python, "-m", "ms_align", "ppo", "ppo.toml"), 900)


def recording_parts(device: str, processes: int) -> Iterator[Part]:
    """A script recorded, its report, and what the links between devices give."""
    profile = (sys.executable, "-m", "ms_profile")
    record = ("--train-script", "layers.py", "--output-dir", "recorded", "--overwrite")
    yield Part(f"{device}, recorded", (*profile, "run", *record), 600)
    yield Part("report", (*profile, "report", "recorded", "--json"), 600)
    backend = {"npu": "hccl", "cuda": "nccl"}.get(device, "gloo")
    if processes > 1:
        link = ("link", "--nproc-per-node", str(processes), "--backend", backend)
        yield Part(f"links, {backend}", (*profile, *link), 600)


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
    return Outcome(part.name, held, time.monotonic() - started, code, output, note)


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


def facts(device: str, processes: int) -> dict[str, Any]:
    """Versions and the device's name."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    found["CANN"] = cann_version(Path(home)) if home else None
    module = getattr(torch, device, None)
    named = getattr(module, "get_device_name", None)
    found["device"] = f"{processes} x {named() if named and device != 'cpu' else device}"
    return found


def cann_version(home: Path) -> str | None:
    """The version that CANN's toolkit states in its `.info` file."""
    for path in sorted(home.glob("*toolkit*.info")) + sorted(home.glob("version.info")):
        for line in path.read_text(errors="replace").splitlines():
            if line.lower().startswith("version="):
                return line.partition("=")[2].strip()
    return None


def write_report(out: Path, device: str, processes: int, outcomes: list[Outcome]) -> None:
    """Write the page and the facts; after each part, so that nothing is lost."""
    found: Mapping[str, Any] = facts(device, processes)
    record = {"facts": found, "outcomes": [each._asdict() for each in outcomes]}
    (out / "report.json").write_text(json.dumps(record, indent=1))
    lines = [f"# Verified on {found['device']}", "", "| what | version |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in found.items() if value]
    lines += ["", "| part | held | seconds | note |", "|---|---|---|---|"]
    for each in outcomes:
        why = each.note or ("" if each.held else f"exit code {each.code}")
        lines.append(
            f"| {each.name} | {'yes' if each.held else 'NO'} | {each.seconds:.0f} | {why} |"
        )
    for each in outcomes:
        lines += ["", f"## {each.name}", "", "```text", each.output[-SHOWN:].strip(), "```"]
    (out / "report.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
