"""The processes of a run: which split what, how they meet, agree, and end."""
