"""Deployment targets, one folder each: rules, writer, reader and runtime behind one value."""
