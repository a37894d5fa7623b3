"""Pictures of timelines: SVG, HTML, and lines for a terminal."""
