"""Handles that users hold: database, writer, reader, transaction, batch."""
