"""Backups: self-contained copies of namespaces on another store, and restores from them."""
