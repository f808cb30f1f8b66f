"""The state of a namespace as its objects show it, without manifests: for rebuild and repair."""
