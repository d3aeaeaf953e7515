"""The desk: read the command line, call, render, return the exit code."""
