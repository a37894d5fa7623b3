"""Engines that run a model: in one process, or under ms-parallel's layouts."""
