"""Drawings of timelines: SVG, HTML and text for a terminal."""
