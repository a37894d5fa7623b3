"""Reports each rank's position (step, collective, line) when a rank is missing."""

from ms_parallel.cluster.watch.heartbeat import Heartbeat, lost_contact
from ms_parallel.cluster.watch.record import position

__all__ = ["Heartbeat", "lost_contact", "position"]
