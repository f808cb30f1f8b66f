"""The grace period of a namespace, changed as a later release may."""

import msgspec

from reef.formats.manifest import Manifest
from reef.manifest.roots import effective_grace_ms


def set_grace(manifest: Manifest, grace_ms: int, now_ms: int) -> Manifest | None:
    """Change the grace period; a lower one takes effect one old grace later (H62)."""
    if grace_ms == manifest.grace_ms:
        return None
    before_ms = effective_grace_ms(manifest, now_ms)
    if grace_ms >= before_ms:
        return msgspec.structs.replace(
            manifest, grace_ms=grace_ms, grace_before_ms=0, grace_lowered_at_ms=0
        )
    return msgspec.structs.replace(
        manifest, grace_ms=grace_ms, grace_before_ms=before_ms, grace_lowered_at_ms=now_ms
    )
