"""Stream batches from an S3 server on this machine and from a local folder, and compare the rates.

`python benchmarks/object_stores.py --tokens 20000000` writes shards of random tokens, copies them
to moto's S3 server, and reads an epoch: from the folder, from S3 with an empty cache, again from
the cache, and from S3 through a proxy that damages a third of the answers. Batches are compared.
With mosaicml-streaming installed, its `StreamingDataset` reads the same rows from the same server.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
import numpy as np

import ms_data

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from faulty_proxy import FAULTS, FaultyProxy
from reference_samples import write_dataset

LENGTH, BATCH = 1024, 32
FRAME_TOKENS = 32_768


def epoch(source: object, batches: int) -> tuple[float, float, int]:
    """Wall and CPU seconds of an epoch, and a checksum of its tokens."""
    wall, cpu, total = time.perf_counter(), time.process_time(), 0
    stream = ms_data.TokenStream(source, sequence_length=LENGTH, batch_size=BATCH, seed=1)  # type: ignore[arg-type]
    for _ in range(batches):
        total += int(next(stream)["tokens"].sum())
    return time.perf_counter() - wall, time.process_time() - cpu, total


def row(name: str, seconds: tuple[float, float, int], tokens: int, extra: str = "") -> None:
    """Print the rates of a source."""
    wall, cpu, _ = seconds
    per_sample = 1e6 * cpu / (tokens / LENGTH)
    rate = f"{tokens / wall / 1e6:7.2f} M tokens/s  {per_sample:6.1f} us CPU/sample"
    sys.stdout.write(f"{name:28} {rate}  {extra}\n")
    sys.stdout.flush()


def mosaic(rows: np.ndarray, endpoint: str, root: Path) -> tuple[float, float, int] | None:
    """Write rows as MDS to the server and read an epoch with MosaicML Streaming."""
    try:
        from streaming import MDSWriter, StreamingDataset
    except ImportError:
        return None
    os.environ.update(S3_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    with MDSWriter(out=str(root / "mds"), columns=columns, compression="zstd:3") as out:
        for tokens in rows:
            out.write({"tokens": tokens})
    store = fsspec.filesystem("s3", key="a", secret="b", endpoint_url=endpoint)
    for file in (root / "mds").iterdir():
        store.pipe_file(f"bucket/mds/{file.name}", file.read_bytes())
    wall, cpu, total = time.perf_counter(), time.process_time(), 0
    dataset = StreamingDataset(
        remote="s3://bucket/mds", local=str(root / "local"), batch_size=BATCH, shuffle=True
    )
    for sample in dataset:
        total += int(sample["tokens"].astype(np.int64).sum())
    return time.perf_counter() - wall, time.process_time() - cpu, total


SERVER = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Run all sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        # Skewed tokens, so that frames compress about as well as text.
        rng = np.random.default_rng(0)
        documents = [
            np.append(np.minimum(rng.zipf(1.3, 2047), 49_000), 499)
            for _ in range(options.tokens // 2048)
        ]
        shards = write_dataset(
            root / "shards",
            documents,
            frame_tokens=FRAME_TOKENS,
            documents_per_shard=2048,
            vocabulary_size=50_000,
        )
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert server.stdout is not None
        port = int(server.stdout.readline())
        try:
            run(shards, port, root, documents)
        finally:
            server.stdin.close()  # type: ignore[union-attr]
            server.wait()


def run(shards: Path, port: int, root: Path, documents: list[np.ndarray]) -> None:
    """Read from each source, and check that all batches are the same."""
    endpoint = f"http://127.0.0.1:{port}"
    options = {"key": "a", "secret": "b", "endpoint_url": endpoint}
    store = fsspec.filesystem("s3", **options)
    store.mkdir("bucket")
    for file in shards.iterdir():
        store.pipe_file(f"bucket/shards/{file.name}", file.read_bytes())
    size = sum(file.stat().st_size for file in shards.iterdir())
    info = ms_data.inspect(shards)
    batches = info.splits["train"].tokens // LENGTH // BATCH
    tokens = batches * BATCH * LENGTH
    sys.stdout.write(f"{tokens:,} tokens, {size / 2**20:.1f} MiB of shards\n")
    local = epoch(shards, batches)
    row("local folder", local, tokens)
    url = "s3://bucket/shards"
    remote = ms_data.RemoteShards(url, cache=root / "cache", options=options)
    first = epoch(remote, batches)
    row("S3, empty cache", first, tokens, f"{local[0] / first[0]:.2f} of the local rate")
    again = epoch(ms_data.RemoteShards(url, cache=root / "cache", options=options), batches)
    row("S3, all cached", again, tokens, f"{local[0] / again[0]:.2f} of the local rate")
    with FaultyProxy(port, rate=0.33) as proxy:
        through = {**options, "endpoint_url": proxy.url}
        faulty = ms_data.RemoteShards(
            url, cache=root / "faulty", options=through, timeout_s=2.0, block_kib=128
        )
        damaged = epoch(faulty, batches)
        faults = {kind: proxy.counts[kind] for kind in FAULTS}
        row("S3, a third of answers bad", damaged, tokens, json.dumps(faults))
        sys.stdout.write(
            f"requests {proxy.counts['GET']}, listings {proxy.counts['LIST']},"
            f" faults {sum(faults.values())}, wrong batches 0\n"
        )
    assert local[2] == first[2] == again[2] == damaged[2]
    flat = np.concatenate(documents)
    rows = flat[: len(flat) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.uint16)
    theirs = mosaic(rows, endpoint, root)
    if theirs is not None:
        row(
            "MosaicML Streaming, S3",
            theirs,
            rows.size,
            f"ours is {theirs[0] / rows.size * tokens / first[0]:.1f} times as fast",
        )


if __name__ == "__main__":
    main()
