"""The step of one window: collect, agree, reduce, normalise, decide, propose, gather, commit."""
