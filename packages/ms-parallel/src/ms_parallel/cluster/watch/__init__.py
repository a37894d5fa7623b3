"""Reports where each rank stands when one of them does not come: its step, collective, line."""

from ms_parallel.cluster.watch.heartbeat import Heartbeat, lost_contact
from ms_parallel.cluster.watch.record import position

__all__ = ["Heartbeat", "lost_contact", "position"]
