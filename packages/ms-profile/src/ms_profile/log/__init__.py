"""Files of a run, written and read: event logs, the ring of spans, manifests."""
