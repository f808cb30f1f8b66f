"""Helpers that the tests of several directories share."""
