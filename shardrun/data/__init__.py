"""Which sample comes when, as a pure function of seed, epoch and index."""
