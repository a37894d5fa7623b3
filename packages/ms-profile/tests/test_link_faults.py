"""Links of known latency and bandwidth between real processes are measured correctly.

The network is emulated below the kernel's TCP (`shaped_network`); gloo and the measurement are
real. A link whose latency times bandwidth exceeds TCP's windows is as slow as TCP makes it.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from ms_profile.analysis.transfers import diagnose, fit_transfers
from ms_profile.analysis.whole_run import Analysis, analyse
from ms_profile.links.matrix import LinkMatrix, find_slow_link

pytest.importorskip("torch")
NETWORK = Path(__file__).with_name("shaped_network.py")
SCRIPT = Path(__file__).with_name("linked_script.py")


class Link(NamedTuple):
    """The link of one pair, the same in both directions."""

    latency_s: float
    rate_bytes_per_s: float


Pair = tuple[int, int]
DEFAULT_LINK = Link(latency_s=2e-4, rate_bytes_per_s=2e8)
MS_PROFILE = [sys.executable, "-m", "ms_profile"]


def run_shaped(
    command: Sequence[str], *, ranks: int, default_link: Link, links: Mapping[Pair, Link]
) -> None:
    """Run a command on every rank of an emulated network; skip if the host does not support it."""
    link_settings = {f"{first}-{second}": link for (first, second), link in links.items()}
    network_settings = json.dumps({"ranks": ranks, "usual": default_link, "links": link_settings})
    full_command = [sys.executable, str(NETWORK), network_settings, *command]
    process = subprocess.run(full_command, capture_output=True, text=True, timeout=400)
    if process.stderr.startswith("no emulated network"):
        pytest.skip(process.stderr.strip())
    assert process.returncode == 0, process.stderr


def measure_network(
    folder: Path, ranks: int, default_link: Link, slow_links: dict[Pair, Link]
) -> LinkMatrix:
    """Return the link matrix that `ms-profile link` measures on such a network."""
    out = folder / "links.json"
    command = [*MS_PROFILE, "link", "--repeats", "5", "--out", str(out)]
    run_shaped(command, ranks=ranks, default_link=default_link, links=slow_links)
    return msgspec.json.decode(out.read_bytes(), type=LinkMatrix)


def analyse_run(
    folder: Path, operation: str, slow_links: dict[Pair, Link], *, ranks: int = 4,
    sizes: tuple[int, ...] = (2_000, 50_000, 150_000), steps: int = 10,
    default_link: Link = DEFAULT_LINK,
) -> Analysis:  # fmt: skip
    """Run the script under `ms-profile run` on such a network; return its analysis."""
    options = ["--skip", "1", "--active", str(steps - 3), "--windows", "1"]
    command = [
        *MS_PROFILE,
        "run",
        "--train-script",
        str(SCRIPT),
        "--output-dir",
        str(folder / "run"),
    ]
    script = [str(steps), operation, *map(str, sizes)]
    run_shaped(
        [*command, *options, "--", *script],
        ranks=ranks,
        default_link=default_link,
        links=slow_links,
    )
    return analyse(folder / "run")


def test_a_links_latency_and_bandwidth_are_measured_within_10_percent(tmp_path: Path) -> None:
    """10 ms and 20 MB/s between two ranks; the emulation adds about 0.2 ms.

    Other load on the CPU slows the emulated link, so the best of three attempts counts.
    """
    for attempt in range(3):
        (tmp_path / str(attempt)).mkdir()
        (pair,) = measure_network(tmp_path / str(attempt), 2, Link(0.01, 2e7), {}).pairs
        if pair.fit.latency_s == pytest.approx(0.01, rel=0.1):
            break
    assert pair.fit.latency_s == pytest.approx(0.01, rel=0.1)
    assert pair.fit.bandwidth_bytes_per_s == pytest.approx(2e7, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "slow_link"),
    [((0, 1), Link(0.03, 4e7)), ((1, 3), Link(0.01, 4e6)), ((2, 3), Link(0.04, 2e7))],
)
def test_the_slow_link_of_four_ranks_is_named_with_its_values(
    tmp_path: Path, pair: tuple[int, int], slow_link: Link
) -> None:
    """One of six links is slower in latency or bandwidth; all six are measured within 10%."""
    default_link = Link(0.01, 4e7)
    links = measure_network(tmp_path, 4, default_link, {pair: slow_link})
    for pair_link in links.pairs:
        expected = slow_link if (pair_link.first, pair_link.second) == pair else default_link
        assert pair_link.fit.latency_s == pytest.approx(expected.latency_s, rel=0.1)
        assert pair_link.fit.bandwidth_bytes_per_s == pytest.approx(
            expected.rate_bytes_per_s, rel=0.1
        )
    detected = find_slow_link(links)
    assert detected is not None
    assert (detected.first, detected.second) == pair


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "kind", "hops"),
    [("all_reduce", "all_reduce", 4), ("broadcast", "broadcast", 2), ("send", "receive", 1)],
)
def test_a_runs_collectives_reveal_the_links_values(
    tmp_path: Path, operation: str, kind: str, hops: int
) -> None:
    """Within 10% of 20 MB/s, and of 10 ms times the number of hops in gloo.

    A gloo receiver first announces that it is ready, and a two-pass ring sends halves around twice;
    a receiver that is ready before the message is sent adds no hop.
    """
    analysis = analyse_run(tmp_path, operation, {}, ranks=2, default_link=Link(0.01, 2e7))
    (fit,) = [
        transfer_fit.fit
        for transfer_fit in fit_transfers(analysis.ledger)
        if transfer_fit.kind == kind
    ]
    assert fit.latency_s == pytest.approx(0.01 * hops, rel=0.1)
    assert fit.bandwidth_bytes_per_s == pytest.approx(2e7, rel=0.1)


DELAYS_MS = (5, 10, 20, 50, 100, 300, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_delays_in_a_link_are_charged_to_its_ranks_in_95_percent(
    tmp_path: Path, operation: str
) -> None:
    """5 ms to 1 s on either of two concurrent pairs: none of seven cases is wrong."""
    wrong = []
    for number, delay_ms in enumerate(DELAYS_MS):
        pair = ((0, 1), (2, 3))[number % 2]
        slow_links = {pair: Link(delay_ms / 1e3, DEFAULT_LINK.rate_bytes_per_s)}
        # One message per step is enough, and with 1 s per message it keeps the test short.
        analysis = analyse_run(
            tmp_path / str(delay_ms), operation, slow_links, sizes=(20_000,), steps=8
        )
        verdict = diagnose(analysis.ledger)
        print(operation, delay_ms, pair, verdict)  # noqa: T201 - the figures of a slow proof
        if verdict is None or verdict.phase != "link" or verdict.ranks != pair:
            wrong.append((delay_ms, pair, verdict))
    assert not wrong
