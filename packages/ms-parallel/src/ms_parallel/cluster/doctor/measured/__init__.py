"""Joint measurements of several processes: clocks, links and the output folder."""
