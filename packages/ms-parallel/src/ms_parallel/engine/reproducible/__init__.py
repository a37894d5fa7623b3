"""Updates whose bits do not depend on which process computed what."""
