"""What runs a model: the Engine Protocol, in one process, and under ms-parallel's layouts."""
