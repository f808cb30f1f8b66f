"""Repair damaged objects: salvage the readable rows, report the lost ones."""
