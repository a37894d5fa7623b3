"""Benchmarks of `ms-profile serve` and `ms-profile memory`: long logs and large snapshots."""

import argparse
import http.client
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ms_profile import EventLog, analyse_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from memory_snapshots import train


def write_log(folder: Path, steps: int) -> None:
    """Write a log of steps with nine numbers each."""
    numbers = random.Random(0)
    with EventLog(folder, rank=0) as log:
        for step in range(steps):
            noise = numbers.random()
            log("step", {"step": step, "loss": 2 + noise, "grad_norm": 1 + noise,
                         "learning_rate": 3e-4, "tokens": 4096, "rate_tokens_per_s": 1e5 + noise,
                         "mfu": 0.4, "memory_bytes": 30 << 30, "data_wait_s": noise / 1000,
                         "step_time_s": 0.04 + noise / 100})  # fmt: skip


def open_run(folder: Path) -> None:
    """Start a server, and time the first answer and the complete one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ms_profile", "serve", str(folder), "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    host = process.stdout.readline().strip().removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=600)
    started, first_s = time.perf_counter(), 0.0
    while True:
        connection.request("GET", "/api/run?name=.&points=350")
        content = connection.getresponse().read()
        first_s = first_s or time.perf_counter() - started
        if b'"progress":1.0' in content:
            break
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024
    used = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().split()[13:15])) / 100
    print(f"first answer {first_s:.2f} s, all read {time.perf_counter() - started:.2f} s, "
          f"{used:.1f} CPU s, peak {peak:.0f} MiB, {len(content) / 1e3:.0f} kB")  # fmt: skip
    process.send_signal(signal.SIGINT)
    process.wait()


def snapshot(folder: Path, events: int) -> None:
    """Write a large snapshot, and time its analysis."""
    allocator = train(blocks=24, steps=3).allocator
    entries = allocator.entries
    copies = [dict(entry) for _ in range(events // len(entries)) for entry in entries[300:]]
    allocator.entries = [*entries, *copies][:events]
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    started = time.process_time()
    (device,) = analyse_memory(path)
    print(f"snapshot of {device.events} events, {path.stat().st_size / 1e6:.0f} MB: "
          f"{time.process_time() - started:.1f} CPU s")  # fmt: skip


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--events", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_log(Path(name) / "events", options.steps)
        log_mb = sum(file.stat().st_size for file in Path(name).glob("events/*")) / 1e6
        print(f"log of {log_mb:.0f} MB")
        print("without an index: ", end="", flush=True)
        open_run(Path(name))
        print("with the index: ", end="", flush=True)
        open_run(Path(name))
        snapshot(Path(name), options.events)


if __name__ == "__main__":
    main()
