"""Run everything that is untested on this type of device and write a report to send back.

    python tools/verify_device.py --out report             # the machine's best accelerator
    python tools/verify_device.py --out report --quick     # without benchmarks and tests
    python tools/verify_device.py --out report --budget-s 480   # the most valuable parts first
    python tools/verify_device.py --out report --only generation --only "ms-kernels"
    python tools/verify_device.py --out report --device cpu     # a dry run at tiny sizes

Needs a clone of the repository with the libraries installed in this Python, or their `src` folders
on PYTHONPATH; no network. Each part runs in its own process with a time limit, so a hang or crash
affects only that part. Parts that check results run several at a time (`--jobs`); then parts that
measure times run one by one. `report/report.md` is a readable summary, `report/figures.md` has the
measurements, written as they arrive, and `report/report.json` has the complete output. They contain
only versions, the device's name and the output of the parts; read them before sending.

With `--budget-s`, checks may use half of the time, and a part at most half of what remains. A part
stopped by this limit, and the parts that depend on it, count as not run.

Exit codes: 0 all parts passed, 1 a part failed or was not run, 2 device not available, 130 stopped
by Ctrl-C (the report lists the completed parts).
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

from verify_inputs import write_inputs
from verify_report import Outcome, Report, facts

ROOT = Path(__file__).resolve().parents[1]
MIN_REMAINING_S = 2.0
"""Smallest remaining budget, in seconds, to start another part."""
TERMINATE_S = 60.0
"""Seconds after SIGTERM for a part to stop its own processes, before SIGKILL."""
TOLERANCE = 1e-3
"""Largest relative difference between a float32 loss on the device and on the CPU. Some devices
round matmul inputs to 10 bits (TF32), a relative error of 2**-11; losses average over many."""
EXPERTS = (
    *("--set", "model=qwen3_moe", "--set", "model_config.num_experts=4"),
    *("--set", "model_config.num_experts_per_tok=2"),
    *("--set", "model_config.moe_intermediate_size=64"),
)
KILL_AND_RESUME = """
import os, signal, subprocess, sys, time
from pathlib import Path

run = subprocess.Popen(sys.argv[1:], start_new_session=True)
while run.poll() is None and not list(Path("killed").glob("checkpoints/*/*")):
    time.sleep(0.01)
print("finished before it could be killed" if run.poll() is not None else "killed", flush=True)
try:
    os.killpg(run.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
run.wait()
sys.exit(subprocess.call(sys.argv[1:]))
"""
CPU, CPU_EXPERTS, CHATS, CPU_TUNING = (
    *("CPU, one process", "CPU, experts", "conversations", "CPU, SFT"),
)
"""Names of parts that other parts depend on."""
HIDE_ACCELERATORS = (
    "env",
    "CUDA_VISIBLE_DEVICES=",
    "ASCEND_RT_VISIBLE_DEVICES=",
    "HIP_VISIBLE_DEVICES=",
)
"""Command prefix that hides all accelerators."""


class Part(NamedTuple):
    """One command of the report, run in its own process."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    shows: str = ""
    """Claim that is proved if the part passes."""
    losses: str = ""
    """Output folder whose losses are compared with the CPU's; empty: no comparison."""
    reference: str = "cpu"
    """Output folder of the CPU run."""
    needs: tuple[str, ...] = ()
    """Names of parts that must run before."""
    is_measurement: bool = False
    """Runs while no other part does; its output goes to figures.md."""


def main() -> int:
    """Run every part and write the report."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python tools/verify_device.py --out report --quick",
    )
    parser.add_argument("--out", type=Path, required=True, help="output folder")
    parser.add_argument("--device", help="npu, cuda, cpu, ...; default: the best available")
    parser.add_argument("--processes", type=int, default=0, help="default: all devices, at most 8")
    parser.add_argument("--quick", action="store_true", help="skip benchmarks and tests")
    parser.add_argument("--budget-s", type=positive, help="total seconds for all parts")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only parts whose name contains NAME"
    )
    parser.add_argument(
        "--jobs", type=int, help="checks to run at a time; default: 1 per 4 cores, at most 4"
    )
    options = parser.parse_args()
    if missing := missing_dependencies():
        sys.stderr.write(
            f"verify_device: not installed in this Python: {', '.join(missing)}; install them, or"
            " copy their wheels to this machine if it has no network\n"
        )
        return 2
    device, count = device_of(options.device)
    if device is None:
        requested = options.device or "accelerator"
        sys.stderr.write(
            f"verify_device: torch finds no {requested} on this machine; install its driver and the"
            " matching build of torch, or use --device cpu to try the script\n"
        )
        return 2
    processes = options.processes or min(8, count)
    parts = tuple(parts_of(device, processes, quick=options.quick))
    if options.only:
        parts = select(parts, options.only)
        if not parts:
            sys.stderr.write(f"verify_device: no part is named {' or '.join(options.only)}\n")
            return 2
    jobs = options.jobs or max(1, min(4, (os.cpu_count() or 1) // 4))
    out: Path = options.out.resolve()
    shutil.rmtree(out / "work", ignore_errors=True)
    (out / "figures.md").unlink(missing_ok=True)
    (out / "work" / "corpus").mkdir(parents=True)
    write_inputs(out / "work")
    report = Report(
        out,
        facts(device, processes),
        planned=[part.name for part in parts],
        excluded=list(excluded_parts(device, processes, quick=options.quick)),
        command=shlex.join(["python", "tools/verify_device.py", *sys.argv[1:]]),
        started=datetime.now(UTC),
    )
    try:
        run_parts(parts, report, out / "work", options.budget_s, jobs)
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")
        return 130
    finally:
        sys.stdout.write(f"{report.summary()}\n")
        sys.stdout.write(f"please send {out / 'report.md'} and report.json next to it\n")
    return 0 if report.all_passed() else 1


def positive(text: str) -> float:
    """Parse a positive number of seconds."""
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(text)
    return seconds


def select(parts: Sequence[Part], names: Iterable[str]) -> tuple[Part, ...]:
    """Return the parts whose name contains one of `names`, and the parts that they need."""
    by_name = {part.name: part for part in parts}
    selected: set[str] = set()
    pending = [part.name for part in parts if any(name in part.name for name in names)]
    while pending:
        name = pending.pop()
        if name not in selected:
            selected.add(name)
            pending += by_name[name].needs
    return tuple(part for part in parts if part.name in selected)


def run_parts(
    parts: Sequence[Part],
    report: Report,
    work_folder: Path,
    budget_s: float | None = None,
    jobs: int = 1,
) -> None:
    """Run the checks, `jobs` at a time, then the measurements one by one, within `budget_s`."""
    ends_s = math.inf if budget_s is None else time.monotonic() + budget_s
    checks = [part for part in parts if not part.is_measurement]
    measurements = [part for part in parts if part.is_measurement]
    checks_end_s = ends_s
    if budget_s is not None and measurements:
        checks_end_s -= budget_s / 2
    runner = Runner(report, work_folder, len(parts))
    runner.run(checks, checks_end_s, jobs)
    runner.run(measurements, ends_s, 1)


class Runner:
    """Runs parts and reports each as it finishes."""

    def __init__(self, report: Report, work_folder: Path, count: int) -> None:
        self.report, self.work_folder, self.count = report, work_folder, count
        self.finished: set[str] = set()
        self.skipped: set[str] = set()

    def run(self, parts: Sequence[Part], ends_s: float, jobs: int) -> None:
        """Run parts in order, `jobs` at a time, each after the parts that it needs."""
        pending, running = list(parts), set[Future[None]]()
        stop = threading.Event()
        with ThreadPoolExecutor(jobs) as pool:
            try:
                while pending or running:
                    while len(running) < jobs and (part := self._next(pending, ends_s)):
                        pending.remove(part)
                        running.add(pool.submit(self._run_one, part, ends_s, stop))
                    if not running:  # the remaining parts need parts that were skipped
                        break
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
            finally:
                stop.set()  # after Ctrl-C, the running parts are terminated

    def _next(self, pending: list[Part], ends_s: float) -> Part | None:
        """Return the next part to start; drop parts that cannot run any more."""
        for part in list(pending):
            is_late = ends_s - time.monotonic() < MIN_REMAINING_S
            if is_late or self.skipped.intersection(part.needs):
                self.skipped.add(part.name)
                pending.remove(part)
            elif self.finished.issuperset(part.needs):
                return part
        return None

    def _run_one(self, part: Part, ends_s: float, stop: threading.Event) -> None:
        limit_s = min(part.limit_s, (ends_s - time.monotonic()) / 2)
        outcome = perform(part._replace(limit_s=limit_s), self.work_folder, stop)
        if stop.is_set():
            return
        if outcome.code is None and limit_s < part.limit_s:
            self.skipped.add(part.name)
            verdict = f"not run: stopped after {limit_s:.0f} s by --budget-s"
        else:
            self.report.add(outcome)
            self.finished.add(part.name)
            verdict = "passed" if outcome.held else "FAILED"
        number = len(self.finished) + len(self.skipped)
        sys.stdout.write(f"{number}/{self.count} {part.name}: {verdict}\n")
        sys.stdout.flush()


def device_of(requested: str | None) -> tuple[str | None, int]:
    """Return the device type and the number of devices; None if it is not available."""
    import torch

    if requested == "cpu":
        return "cpu", 2
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None or (requested and requested != accelerator.type):
        return None, 0
    return accelerator.type, torch.accelerator.device_count()


def parts_of(device: str, processes: int, *, quick: bool) -> Iterator[Part]:
    """All parts: dependencies first, then the most informative per second."""
    python = sys.executable
    driver = driver_command(device)
    if driver:
        yield Part("driver", driver, 60, "driver and devices")
    if is_importable("ms_profile"):
        doctor = (python, "-m", "ms_profile", "doctor")
        shows = "versions, devices, memory, and problems with them"
        yield Part("doctor", doctor, 300, shows)
    check = (python, "-m", "ms_kernels", "check", "--device", device)
    shows = "each backend, forward and backward, within its error bound"
    yield Part("operators against float64", check, 3600, shows)
    yield from training_parts(device)
    if is_importable("ms_align"):
        yield from alignment_parts(device)
    if is_importable("ms_compress"):
        command = (python, "-m", "ms_compress", "qat", "quantized.toml")
        yield Part(
            f"{device}, quantized weights",
            command,
            900,
            "quantization-aware training completes",
            needs=(CPU,),
        )
    if is_importable("ms_profile"):
        yield from recording_parts(device, processes)
    yield from layout_parts(device, processes)
    if quick:
        return
    if is_importable("pytest"):
        for package in sorted(path.name for path in (ROOT / "packages").iterdir()):
            command = (
                python,
                "-m",
                "pytest",
                "-q",
                "-m",
                "gpu",
                f"{ROOT}/packages/{package}/tests",
            )
            yield Part(f"tests of {package}", command, 3600, "tests that need a device")
    yield from measurement_parts(device)


def measurement_parts(device: str) -> Iterator[Part]:
    """Speed and memory; on the CPU a dry run of the same scripts at tiny sizes."""
    tiny = ("--tiny",) if device == "cpu" else ()
    training, generation = benchmark("ms-parallel", "gpu"), benchmark("ms-align", "generation_gpu")
    compared = ("--variant", "default", "--variant", "plain", "--variant", "kernels")
    shows = "tokens per second and peak memory next to a plain compiled loop"
    command = (*training, "--seconds", "240", *compared, *tiny)
    yield Part("training, 1B Llama", command, 300, shows, is_measurement=True)
    command = (*benchmark("ms-kernels", "gpu"), *(("--dry",) if tiny else ()))
    shows = "operators next to torch.compile and the memory's bandwidth"
    yield Part("operators, speed", command, 600, shows, is_measurement=True)
    if is_importable("ms_align") and is_importable("transformers"):
        command, shows = (*generation, *tiny), "tokens per second next to transformers"
        yield Part("generation", command, 300, shows, is_measurement=True)
    for model, name in (("qwen3-moe", "Qwen3-MoE"), ("llama-3b", "3B Llama")):
        command = (*training, "--model", model, "--seconds", "150", *tiny)
        shows = "tokens per second and peak memory"
        yield Part(f"training, {name}", command, 200, shows, is_measurement=True)
    if is_importable("ms_profile") and device != "cpu":
        command, shows = benchmark("ms-profile", "gpu"), "the recorder's cost"
        yield Part("recorder, speed", command, 300, shows, is_measurement=True)


def benchmark(package: str, script: str) -> tuple[str, str]:
    """Command of a benchmark script."""
    return sys.executable, str(ROOT / "packages" / package / "benchmarks" / f"{script}.py")


def excluded_parts(device: str, processes: int, *, quick: bool) -> Iterator[str]:
    """Parts that are not run, with the reasons."""
    if device != "cpu" and driver_command(device) is None:
        yield "driver: its command is not installed"
    for module in ("ms_align", "ms_compress", "ms_profile"):
        if not is_importable(module):
            yield f"parts of {module.replace('_', '-')}: it is not installed"
    if processes < 2:
        yield "layouts and links: only one device"
    elif processes < 8:
        yield f"layouts of more than {processes} devices: not enough devices"
    if quick:
        yield "tests that need a device, and benchmarks: --quick"
    elif not is_importable("pytest"):
        yield "tests that need a device: pytest is not installed"
    if device == "cpu" and not quick:
        yield "recorder, speed: it needs an accelerator"


def missing_dependencies() -> list[str]:
    """Names of the packages' dependencies that are not installed."""
    names: set[str] = set()
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        requirements = tomllib.loads(file.read_text())["project"]["dependencies"]
        names |= {re.split(r"[^A-Za-z0-9_-]", text, maxsplit=1)[0] for text in requirements}
    return sorted(name for name in names if not is_installed(name))


def is_installed(distribution: str) -> bool:
    """Whether a distribution is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_importable(module: str) -> bool:
    """Whether the module can be imported."""
    return importlib.util.find_spec(module) is not None


def driver_command(device: str) -> tuple[str, ...] | None:
    """Command of the device's driver that lists devices; None if not installed."""
    command = {"npu": ("npu-smi", "info"), "cuda": ("nvidia-smi",)}.get(device)
    return command if command and shutil.which(command[0]) else None


def training_parts(device: str) -> Iterator[Part]:
    """Training in one process: uninterrupted, killed and resumed, dense and mixture of experts."""
    base = "reference losses for other parts"
    yield Part(CPU, train(1, "cpu", "cpu"), 900, base, "cpu")
    shows = f"losses of six steps, within {TOLERANCE:g} of the CPU's"
    yield Part(f"{device}, one process", train(1, device, "one"), 900, shows, "one", needs=(CPU,))
    half = (*train(1, device, "half"), "--set", "mixed_precision=true")
    yield Part(f"{device}, bfloat16", half, 900, "bfloat16: finite losses", "half", "half", (CPU,))
    kernels = (*train(1, device, "kernels"), "--set", "ops=ms_kernels")
    yield Part(
        f"{device}, ms-kernels", kernels, 900, f"fused operators: {shows}", "kernels", needs=(CPU,)
    )
    save_each_step = ("--set", "checkpoint_every=1")
    kill_and_resume = (
        sys.executable,
        "-c",
        KILL_AND_RESUME,
        *train(1, device, "killed"),
        *save_each_step,
    )
    name = f"{device}, killed and resumed"
    yield Part(
        name,
        kill_and_resume,
        900,
        "after kill -9, the losses of an uninterrupted run",
        "killed",
        needs=(CPU,),
    )
    reference = "cpu-experts"
    yield Part(
        CPU_EXPERTS,
        (*train(1, "cpu", reference), *EXPERTS),
        900,
        base,
        reference,
        reference,
        (CPU,),
    )
    experts = (*train(1, device, "experts"), *EXPERTS)
    yield Part(
        f"{device}, experts",
        experts,
        900,
        f"a mixture of experts: {shows}",
        "experts",
        reference,
        (CPU_EXPERTS,),
    )


def layout_parts(device: str, processes: int) -> Iterator[Part]:
    """Training on every axis, compared with one process on the CPU."""
    shows = f"losses of six steps, within {TOLERANCE:g} of the CPU's"
    for axes in layouts(processes):
        name = ", ".join(f"{axis}={ranks}" for axis, ranks in axes.items())
        ranks = math.prod(n for axis, n in axes.items() if axis != "expert")
        sets = [part for axis, n in axes.items() for part in ("--set", f"layout.{axis}={n}")]
        model_options = EXPERTS if "expert" in axes else ()
        command = (*train(ranks, device, "-".join(axes)), *sets, *model_options)
        reference = "cpu-experts" if model_options else "cpu"
        needs = (CPU_EXPERTS,) if model_options else (CPU,)
        claim = f"collectives of {ranks} processes: {shows}"
        yield Part(f"{device}, {name}", command, 900, claim, "-".join(axes), reference, needs)


def layouts(processes: int) -> Iterator[dict[str, int]]:
    """Single axes, and products of two and three axes if there are enough devices."""
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


def alignment_parts(device: str) -> Iterator[Part]:
    """SFT compared with the CPU, and rollouts and updates of PPO."""
    python = sys.executable
    build = ("--tokenizer", "cpu/tokenizer.json", "--chat-template", "chat.jinja", "--out", "chats")
    command = (python, "-m", "ms_data", "build", "chats.jsonl", *build)
    yield Part(CHATS, command, 300, "shards for SFT", needs=(CPU,))
    tune = (python, "-m", "ms_align", "sft", "tuning.toml")
    reference = "cpu-tuning"
    command = (*HIDE_ACCELERATORS, *tune, "--set", f"output_dir={reference}")
    yield Part(CPU_TUNING, command, 900, "reference losses for SFT", reference, reference, (CHATS,))
    shows = f"losses of six steps, within {TOLERANCE:g} of the CPU's"
    yield Part(f"{device}, SFT", tune, 900, shows, "tuning", reference, (CPU_TUNING,))
    ppo = (python, "-m", "ms_align", "ppo", "ppo.toml")
    shows = "rollouts, rewards and updates: finite losses"
    # The policy is the tuned model.
    yield Part(f"{device}, PPO", ppo, 900, shows, "ppo", "ppo", (CPU_TUNING,))


def recording_parts(device: str, processes: int) -> Iterator[Part]:
    """A recorded script, its report, and the bandwidth between devices."""
    profile = (sys.executable, "-m", "ms_profile")
    record = ("--train-script", "layers.py", "--output-dir", "recorded", "--overwrite")
    yield Part(f"{device}, recorded", (*profile, "run", *record), 600, "a script can be recorded")
    report = (*profile, "report", "recorded")
    recorded = f"{device}, recorded"
    yield Part("report", report, 600, "the device's own trace can be read", needs=(recorded,))
    backend = {"npu": "hccl", "cuda": "nccl"}.get(device, "gloo")
    if processes > 1:
        link = ("link", "--nproc-per-node", str(processes), "--backend", backend)
        yield Part(f"links, {backend}", (*profile, *link), 600, "bandwidth between devices")


def train(processes: int, device: str, folder: str) -> tuple[str, ...]:
    """Command that trains a small model on the shared corpus."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    command = ("-m", "ms_parallel", "train", "run.toml")
    settings = ("--set", f"device={device}", "--set", f"output_dir={folder}")
    return (sys.executable, *(launcher if processes > 1 else ()), *command, *settings)


def perform(part: Part, work_folder: Path, stop: threading.Event | None = None) -> Outcome:
    """Run a part and compare its losses with the CPU's; `stop` ends it early."""
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    code, raw_output = run(part, work_folder, environment, stop or threading.Event())
    output = raw_output.decode(errors="replace")
    # pytest exits with 5 if a package has no tests that need a device.
    passed, note = code == 0 or (code == 5 and "pytest" in part.command), ""
    if passed and part.losses:
        passed, note = compare(work_folder, part.losses, part.reference)
    elif not passed:
        note = f"exit code {code}" if code is not None else f"timeout after {part.limit_s:g} s"
    return Outcome(
        part.name, part.shows, passed, round(time.monotonic() - started, 1), code, output, note
    )


def run(
    part: Part, work_folder: Path, environment: Mapping[str, str], stop: threading.Event
) -> tuple[int | None, bytes]:
    """Return a part's exit code (None after a timeout) and its output."""
    with output_file_of(part, work_folder) as output_file:
        start = output_file.tell()
        process = subprocess.Popen(
            part.command,
            cwd=work_folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=subprocess.STDOUT,
        )
        ends_s, code = time.monotonic() + part.limit_s, None
        while code is None and time.monotonic() < ends_s and not stop.is_set():
            try:
                code = process.wait(min(1.0, max(0.0, ends_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                continue
        if code is None:
            process.terminate()  # lets torchrun stop its workers, which would occupy the device
            try:
                process.wait(TERMINATE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        output_file.seek(start)
        return code, output_file.read()


def output_file_of(part: Part, work_folder: Path) -> IO[bytes]:
    """Open the file for a part's output: figures.md for measurements, which survives a crash."""
    if not part.is_measurement:
        return tempfile.TemporaryFile()
    file = (work_folder.parent / "figures.md").open("a+b")
    file.write(f"\n## {part.name}\n\n".encode())
    file.flush()
    return file


def compare(work_folder: Path, folder: str, reference: str = "cpu") -> tuple[bool, str]:
    """Compare a run's losses with the CPU's; return the verdict and a note."""
    device_losses, cpu_losses = losses_of(work_folder / folder), losses_of(work_folder / reference)
    if not device_losses or len(device_losses) != len(cpu_losses):
        return False, f"{len(device_losses)} losses, but the CPU run has {len(cpu_losses)}"
    if not all(map(math.isfinite, [*device_losses, *cpu_losses])):
        return False, "a loss is not finite"
    if folder == reference:
        return True, f"{len(device_losses)} losses, all finite"
    max_difference = max(
        abs(a - b) / abs(b) for a, b in zip(device_losses, cpu_losses, strict=True)
    )
    return (
        max_difference <= TOLERANCE,
        f"losses differ from the CPU's by {max_difference:.1e} at most",
    )


def losses_of(folder: Path) -> list[float]:
    """Losses of a run by step; NaN for null, which the log has for values that are not finite.

    A resumed run repeats steps after its last checkpoint; the last loss of a step counts.
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
