"""Sweep: delete objects that no retained generation, pin or job needs."""
