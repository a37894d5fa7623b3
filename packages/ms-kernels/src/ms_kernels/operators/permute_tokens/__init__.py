"""Rows sorted by the expert that each token chose, so that an expert's rows stand together."""
