"""Events and progress lines of a run's steps."""

from attrs import asdict, frozen

from ms_parallel.engine.balance.balancer import ExpertLoad
from ms_parallel.engine.report import StepReport
from ms_parallel.events import OnEvent
from ms_parallel.progress import RunDisplay, Throughput
from ms_parallel.training.audits import AuditLog


@frozen(kw_only=True)
class StepLog:
    """Log of a run's steps; only rank 0 writes anything."""

    total: int
    """Steps of the whole run."""
    every: int
    """Steps between progress lines."""
    display: RunDisplay
    emit: OnEvent
    audits: AuditLog | None
    """None on ranks other than 0."""

    def log(self, step: int, report: StepReport, throughput: Throughput) -> None:
        """Emit a step and its measurements."""
        self.display.show_step(step, {"loss": report.loss}, throughput)
        scale = {} if report.loss_scale is None else {"loss_scale": report.loss_scale}
        self.emit(
            "step",
            {
                "step": step,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "learning_rate": report.learning_rate,
                "tokens": report.tokens,
                "rate_tokens_per_s": round(throughput.rate_tokens_per_s, 1),
                **scale,
                **{
                    f"mtp_loss.{depth}": mtp_loss
                    for depth, mtp_loss in enumerate(report.mtp_losses, 1)
                },
            },
        )
        if report.audit is not None and self.audits is not None:
            self.audits.log(step, report.audit)
        if step % self.every == 0 or step == self.total:
            if report.experts is not None:
                self._load(step, report.experts)
            if report.context is not None:
                self.emit("context", {"step": step, **asdict(report.context)})

    def close(self) -> None:
        """Write the page of all audits."""
        if self.audits is not None:
            self.audits.draw()

    def _load(self, step: int, load: ExpertLoad) -> None:
        """Log the load of the experts."""
        self.emit(
            "experts",
            {
                "step": step,
                "balance_loss": load.balance_loss,
                "z_loss": load.z_loss,
                "entropy": sum(load.entropy) / len(load.entropy),
                "highest_load": load.highest_load,
                "highest_rank_load": load.highest_rank_load,
                "dropped_share": load.dropped_share,
                **load.by_layer,
            },
        )
