"""Logs each step of a run: its events, and its line of progress."""

from attrs import asdict, frozen

from ms_parallel.engine.balance.balancer import ExpertLoad
from ms_parallel.engine.report import StepReport
from ms_parallel.events import OnEvent
from ms_parallel.progress import RunDisplay, Throughput
from ms_parallel.training.course.audits import Audits


@frozen(kw_only=True)
class StepLog:
    """Logs the steps of a run; only the first process writes anything."""

    total: int
    """Steps of the whole run."""
    every: int
    """Steps between lines of progress."""
    show: RunDisplay
    emit: OnEvent
    audits: Audits | None
    """None on all but the first process."""

    def log(self, step: int, update: StepReport, pace: Throughput) -> None:
        """Log an update, and what was measured with it."""
        self.show.show_step(step, {"loss": update.loss}, pace)
        scale = {} if update.loss_scale is None else {"loss_scale": update.loss_scale}
        self.emit(
            "step",
            {
                "step": step,
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "tokens": update.tokens,
                "rate_tokens_per_s": round(pace.rate_tokens_per_s, 1),
                **scale,
                **{f"mtp_loss.{depth}": each for depth, each in enumerate(update.mtp_losses, 1)},
            },
        )
        if update.audit is not None and self.audits is not None:
            self.audits.log(step, update.audit)
        if step % self.every == 0 or step == self.total:
            if update.experts is not None:
                self._load(step, update.experts)
            if update.context is not None:
                self.emit("context", {"step": step, **asdict(update.context)})

    def _load(self, step: int, load: ExpertLoad) -> None:
        """Log how tokens were shared out over experts."""
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
