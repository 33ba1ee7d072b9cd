"""One decoder of any size, on one device or many."""
