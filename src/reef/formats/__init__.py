"""Bytes to values and back: WAL objects, segments, manifests.

Nothing here does I/O or reads a clock. Every decoder takes the object's name, so that its
errors can say where the damage is, and never allocates more than the object's size allows.
"""
