"""What all operators of one backend share: where it runs, what it declines, how it launches."""
