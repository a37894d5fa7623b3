"""What a run writes and reads back: events, the ring of spans, manifests."""
