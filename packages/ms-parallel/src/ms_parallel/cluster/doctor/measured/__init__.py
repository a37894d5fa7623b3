"""What several processes measure together: clocks, links and the folder of a run."""
