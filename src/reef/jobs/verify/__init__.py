"""Verify: read every object of a namespace and report the problems."""
