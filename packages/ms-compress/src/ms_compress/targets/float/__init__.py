"""Plain model folders, run by torch in float32."""
