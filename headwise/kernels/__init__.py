"""Fast paths of attention, each beside a plain twin that the tests compare it with."""
