"""Rebuild a namespace from its segments and log when its manifests are lost."""
