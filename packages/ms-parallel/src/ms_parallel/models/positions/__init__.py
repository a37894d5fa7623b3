"""How far each position is turned, and how config.json says it."""
