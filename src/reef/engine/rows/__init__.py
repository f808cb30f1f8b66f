"""Rows in and out: arguments of callers as operations, versions as rows and Arrow."""
