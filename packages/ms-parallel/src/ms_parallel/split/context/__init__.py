"""Shares out the positions of rows over the context axis, so that attention sees whole rows."""
