"""Code shared by all operators of a backend: devices, supported calls, kernel launches."""
