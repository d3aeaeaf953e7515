"""Ranks talking to each other: validated settings, groups, fingerprints, poisoning, slice collectives."""
