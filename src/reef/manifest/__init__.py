"""The root of visibility: numbered manifests, published by compare-and-swap.

`head` finds the newest one, `edits` make the next one (pure), `invariants` say what must
hold, `publish` puts it there. Everything that is visible changes by one publish.
"""
