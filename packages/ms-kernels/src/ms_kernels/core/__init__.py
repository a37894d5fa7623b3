"""Dispatch of calls to implementations, and their registration with torch.library."""
