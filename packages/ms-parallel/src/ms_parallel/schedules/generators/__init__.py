"""Every schedule generator, one a file; the registry finds them."""
