"""The config: what it may say (schema), how it is read (load), how the command line changes it (overrides)."""
