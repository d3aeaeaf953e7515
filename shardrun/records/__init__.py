"""What optimizer state looks like outside the process: file header, record, and whether a record fits."""
