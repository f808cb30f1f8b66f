"""Erasure: remove all versions of some keys from every object of a namespace."""
