"""The rank paper's statements as numbers: harmonics, constructions, random heads, and checks of
every claim. No training runs."""
