"""Examine the machines of all ranks: connect, record each rank, and take joint measurements."""

import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from attrs import evolve

from ms_profile.doctor.capture import capture
from ms_profile.doctor.checks import DoctorFinding, failure
from ms_profile.doctor.clocks import gather_bytes, measure_clocks
from ms_profile.doctor.output_folder import measure_folders
from ms_profile.doctor.recording import Examined, MachineRecording, Measured, Pair
from ms_profile.entry import FAILED
from ms_profile.errors import DoctorError, LaunchError, number_in_environment
from ms_profile.links.measure import Pairs, measure_links
from ms_profile.recording.plan import ProcessRank

CONNECT_S: Final = 120.0
"""Longer than `MESSAGES_S`, so that the doctor reports before the library gives up."""
MESSAGES_S: Final = 90.0
EXTRA_S: Final = 10.0
"""Extra time of ranks other than 0, as a launcher ends all ranks when the first one ends."""
MAX_NAMED: Final = 4
MAX_ROUNDS: Final = 64
MAX_SEQUENTIAL: Final = 8
"""Maximum number of ranks whose pairs are measured one at a time; more measure in parallel."""
SIZES_BYTES, TRIPS = (8, 16 << 20), (32, 3)
"""Message sizes for latency and bandwidth, and round trips of each."""
SLURM_PORTS: Final = range(20_000, 32_000)
"""Below the range that Linux uses for outgoing connections."""
FIRST_NODE: Final = re.compile(r"([A-Za-z0-9_.-]+)(?:\[([0-9]+)[^\]]*\]([A-Za-z0-9_.-]*))?")
LOG_BYTES: Final = 256 << 10
LOG_WORDS: Final = ("NET/", "Using network", "GDR", "P2P is disabled", "NCCL version", "WARN")
"""Substrings of the lines of NCCL's log that are recorded."""


def connect(device_name: str | None) -> torch.device:
    """Create the process group if there are several ranks; return this rank's device.

    Args:
        device_name: `cpu` or an accelerator; None for the machine's best device.

    Raises:
        DoctorError: the machine has no such device.
        LaunchError: the ranks cannot connect.
    """
    process = ProcessRank.from_environment()
    device = pick_device(device_name, process.local_rank)
    if process.world_size == 1:
        return device
    set_rendezvous(process.world_size)
    backend = dist.get_default_backend_for_device(device)
    try:
        dist.init_process_group(
            # With an accelerator, gloo handles CPU tensors.
            backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}",
            init_method="env://",
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=CONNECT_S + 2 * process.world_size),
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise LaunchError(
            f"rank {process.rank} did not connect at {address} ({reason}); check that all ranks"
            " were started and reach this address"
        ) from error
    return device


def pick_device(name: str | None, local_rank: int) -> torch.device:
    """Return the named device, or the machine's best; sets it for this process.

    Raises:
        DoctorError: the machine has no such device, or fewer devices than ranks.
    """
    best = torch.accelerator.current_accelerator(check_available=True)
    try:
        device = torch.device(name or best or "cpu")
    except RuntimeError as error:
        raise DoctorError(
            f"--device must be a device of torch, got {name!r}; use cpu, or for example cuda:0"
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    if best is None or device.type != best.type:
        available = "no accelerator" if best is None else best.type
        raise DoctorError(f"this machine has {available}, got --device {name}; use --device cpu")
    index = local_rank if device.index is None else device.index
    count = torch.accelerator.device_count()
    if index >= count:
        raise DoctorError(
            f"rank {local_rank} of this machine needs {device.type}:{index}, and there are {count};"
            " start fewer ranks, or use --device cpu"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def set_rendezvous(world_size: int) -> None:
    """Derive MASTER_ADDR and MASTER_PORT from Slurm's step if the launcher has not set them."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    first_node = FIRST_NODE.match(os.environ.get("SLURM_STEP_NODELIST", "").strip())
    if "SLURM_STEP_ID" not in os.environ or first_node is None:
        raise DoctorError(
            f"{world_size} ranks need MASTER_ADDR and MASTER_PORT; start them with torchrun or srun"
        )
    job, step = (number_in_environment(f"SLURM_{name}_ID", 0) for name in ("JOB", "STEP"))
    os.environ["MASTER_ADDR"] = "".join(part for part in first_node.groups() if part)
    # Every rank derives the same port, and concurrent steps of a job most likely different ones.
    os.environ["MASTER_PORT"] = str(SLURM_PORTS[(131 * job + step) % len(SLURM_PORTS)])


def examine(
    device: torch.device,
    folder: Path | None,
    on_lost: Callable[[Examined, DoctorFinding], object],
) -> Examined | None:
    """Record all ranks and measure clocks, the output folder and links between them. Collective.

    Args:
        device: device for this rank's messages.
        folder: output folder to test; None to skip.
        on_lost: called on rank 0 with the results so far and a finding if messages do not arrive;
            the process then ends with exit code 1.

    Returns:
        On rank 0 the results; None on other ranks.
    """
    recording = capture()
    if not dist.is_initialized():
        folders = [] if folder is None else measure_folders(folder)
        return Examined(ranks=(recording,), measured=Measured(folders=folders))
    parts = gather_bytes(msgspec.json.encode(recording))
    clocks = measure_clocks()
    folders = [] if folder is None else measure_folders(folder)
    examined = None
    if dist.get_rank() == 0:
        examined = Examined(
            ranks=tuple(msgspec.json.decode(part, type=MachineRecording) for part in parts),
            measured=Measured(clocks=clocks, folders=folders),
        )
    return examine_links(examined, device, on_lost)


def examine_links(
    examined: Examined | None,
    device: torch.device,
    on_lost: Callable[[Examined, DoctorFinding], object],
    *,
    timeout_s: float = MESSAGES_S,
) -> Examined | None:
    """Measure messages between all pairs of ranks. Collective; rank 0 gets the result.

    Args:
        examined: on rank 0, the results so far; None on other ranks.
        device: device for this rank's messages.
        on_lost: as in `examine`.
        timeout_s: seconds after which messages count as lost, plus one per rank.
    """
    world, current = dist.get_world_size(), list[tuple[int, int]]()
    backend = dist.get_default_backend_for_device(device)
    rounds = pair_rounds(world)

    def set_current(pairs: Pairs) -> None:
        current[:] = pairs

    def report_lost() -> None:
        if examined is not None:
            lost = _lost_messages(examined, current, backend, timeout_s + world)
            on_lost(examined, lost)

    # Rank 0 reports first; the others wait longer, as the first exit ends them all.
    time_limit_s = timeout_s + world + (0 if examined is not None else EXTRA_S)
    with nccl_log() as log, watchdog(time_limit_s, report_lost):
        matrix = measure_links(
            sizes_bytes=SIZES_BYTES,
            repeats=TRIPS,
            device=device,
            rounds=rounds,
            on_round=set_current,
        )
        log_text = relevant_lines(log)
    if examined is None:
        return None
    pairs = [
        Pair(
            first=pair.first,
            second=pair.second,
            latency_us=pair.times_s[0] * 1e6,
            bandwidth_gb_per_s=SIZES_BYTES[1] / pair.times_s[1] / 1e9,
        )
        for pair in sorted(matrix.pairs, key=lambda pair: (pair.first, pair.second))
    ]
    measured = msgspec.structs.replace(
        examined.measured,
        backend=backend,
        pairs=pairs,
        together=any(len(round_pairs) > 1 for round_pairs in rounds),
        log=log_text,
    )
    return evolve(examined, measured=measured)


def pair_rounds(world: int) -> list[list[tuple[int, int]]]:
    """Arrange all pairs in rounds in which each rank has at most one partner.

    Args:
        world: number of ranks. Up to `MAX_SEQUENTIAL` ranks have one pair per round; beyond
            `MAX_ROUNDS` ranks, each rank has `MAX_ROUNDS` partners.
    """
    # Round-robin tournament: the first seat stays, the others rotate. An odd seat out is -1.
    seats = [*range(world), *([-1] if world % 2 else [])]
    half, rounds = len(seats) // 2, []
    for _ in range(min(len(seats) - 1, MAX_ROUNDS)):
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in opposite if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    if world > MAX_SEQUENTIAL:
        return rounds
    return [[pair] for pairs in rounds for pair in pairs]


def _lost_messages(examined: Examined, pairs: Pairs, backend: str, seconds: float) -> DoctorFinding:
    named = ", ".join(f"{first} and {second}" for first, second in pairs[:MAX_NAMED])
    finding = failure(
        examined.ranks[0],
        f"ranks {named}",
        what=f"messages over {backend} did not arrive within {seconds:.0f} s",
        why="a run would hang in its first collective; further links were not measured",
        remedy="fix the other findings; then check firewalls between the machines and the MTU along"
        " the way" + ", and run with NCCL_DEBUG=INFO" * (backend == "nccl"),
    )
    return msgspec.structs.replace(finding, check="links")


def not_connected(recording: MachineRecording, reason: str) -> DoctorFinding:
    """Finding for a rank that could not connect to the others."""
    finding = failure(
        recording,
        "the start",
        what=f"the ranks did not connect: {reason}",
        why="no run can start, and only this rank was examined",
        remedy="fix the other findings, and check that all machines reach MASTER_ADDR at"
        " MASTER_PORT",
    )
    return msgspec.structs.replace(finding, check="start")


@contextmanager
def watchdog(seconds: float, report: Callable[[], object]) -> Iterator[None]:
    """End this process with exit code 1 if the block takes too long.

    A collective library's own timeout would end the process without the results so far.

    Args:
        seconds: time limit.
        report: called before, on another thread.
    """
    done = threading.Event()

    def watch() -> None:
        if done.wait(seconds):
            return
        try:
            report()
            sys.stdout.flush()
        finally:
            # `sys.exit` would only end this thread: the main thread is stuck in the library.
            os._exit(FAILED)

    threading.Thread(target=watch, name="ms-profile-doctor", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def nccl_log() -> Iterator[Path]:
    """Let NCCL log its initialization to a temporary file, unless the user has set a log file.

    Enter this before NCCL sends its first message, as it reads the variables once.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl.log"
        variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(path)}
        previous = {name: os.environ.get(name) for name in variables}
        if previous["NCCL_DEBUG_FILE"] is None:
            os.environ.update(variables)
        try:
            yield path
        finally:
            for name, value in previous.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def relevant_lines(path: Path) -> str:
    """Return the lines of NCCL's log about the network in use; empty without a log."""
    try:
        with path.open("rb") as file:
            text = file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if any(word in line for word in LOG_WORDS)]
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))
