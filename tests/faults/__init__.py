"""Real faults in real steps: what the others hold afterwards, and how soon they are out."""
