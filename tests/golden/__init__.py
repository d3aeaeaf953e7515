"""A tiny checkpoint of format 1 that must load for ever, and the state it was made of."""
