"""One job: the parent that launches, the worker that trains, the proof that a resume is exact."""
