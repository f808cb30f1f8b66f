"""Bulk loads: stage segments, then make them visible with one WAL object."""
