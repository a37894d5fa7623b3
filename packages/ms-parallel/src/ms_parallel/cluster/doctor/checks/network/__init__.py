"""Checks of what joins the machines: ports, their rates and packets, and who uses them."""
