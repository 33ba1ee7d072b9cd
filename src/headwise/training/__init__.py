"""Many small models trained at once."""
