"""Listings of a sweep: skipped generations are not there, condemned objects are known."""

from tests.support.sweep_world import DAY_S, GRACE_S, folded_world


def test_a_sweep_does_not_load_skipped_generations():
    """A repair gave them up: their manifests may be gone, and nothing is read by them."""
    world = folded_world()
    skipped = world.publish().generation
    world.publish()
    world.compact()
    world.bucket.delete(world.names.manifest(skipped))
    world.publish(skipped_generations=(skipped,))
    report = world.sweep(apply=False, retain_generations_s=1e6)
    assert report.condemned == ()


def test_a_condemned_object_is_not_condemned_again():
    """Its grace period began when it was condemned: another sweep does not begin it again."""
    world = folded_world()
    world.compact()
    world.advance(2 * DAY_S)  # older than the outputs of any job that is running
    reports = []
    for _ in range(4):  # generations first, then what only they named
        world.advance(10)
        reports.append({doomed.key for doomed in world.sweep().condemned})
    keys = [key for report in reports for key in report if key.startswith("segments/")]
    assert len(keys) == len(set(keys)) > 0
    since = {entry.key: entry.since_ms for entry in world.head().condemned}
    world.advance(GRACE_S / 2)
    world.sweep()
    again = {entry.key: entry.since_ms for entry in world.head().condemned}
    assert {key: again[key] for key in keys} == {key: since[key] for key in keys}
