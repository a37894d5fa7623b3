"""On an accelerator, kernel times and their overlap match torch's own table."""

from pathlib import Path

import pytest

from ms_profile.analysis.operators import kernel_table, operator_table
from ms_profile.analysis.whole_run import analyse

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def test_kernel_times_match_torchs_table(tmp_path: Path) -> None:
    """Total kernel time and device time per operator of a real training step agree within 1%."""
    from torch.profiler import profile, record_function

    device = torch.accelerator.current_accelerator()
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 256, 512, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.accelerator.synchronize()
    with profile(record_shapes=True) as profiler:
        for number in range(4):
            with record_function(f"ProfilerStep#{number}"):
                step()
                torch.accelerator.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "rank-0.json"))

    rank_analysis = analyse(tmp_path / "rank-0.json").ranks[0]
    torch_events = {event.key: event for event in profiler.key_averages()}
    kernels = kernel_table(rank_analysis.trace)
    total_us = sum(
        event.self_device_time_total
        for event in torch_events.values()
        if event.device_type != torch.autograd.DeviceType.CPU
        and not event.key.startswith(("ProfilerStep", "Optimizer."))
    )
    assert sum(row.total_ns for row in kernels) / 1e3 == pytest.approx(total_us, rel=0.01)
    for row in operator_table(rank_analysis.trace):
        event = torch_events.get(row.name)
        if row.device_ns and event is not None and event.self_device_time_total > 100:
            expected = pytest.approx(event.self_device_time_total, rel=0.01)
            assert row.device_ns / 1e3 == expected, row.name
    assert len(rank_analysis.breakdowns) == 4
    for breakdown in rank_analysis.breakdowns:
        assert sum(breakdown.phases_ns.values()) == breakdown.step.duration_ns
        assert breakdown.phases_ns["compute"] > 0
