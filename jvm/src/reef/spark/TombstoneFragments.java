package reef.spark;

import java.util.Arrays;
import java.util.List;
import java.util.TreeSet;

/** Range tombstones cut at each other's bounds; in each fragment only the newest one matters. Keys are asked for in order. */
final class TombstoneFragments {
  private final byte[][] starts;
  private final RangeTombstone[] newest;
  private int at;

  TombstoneFragments(List<RangeTombstone> tombstones) {
    TreeSet<byte[]> bounds = new TreeSet<>(Arrays::compareUnsigned);
    for (RangeTombstone tombstone : tombstones) {
      bounds.add(tombstone.start());
      bounds.add(tombstone.end());
    }
    starts = bounds.toArray(new byte[0][]);
    newest = new RangeTombstone[starts.length];
    for (RangeTombstone tombstone : tombstones) {
      int from = Arrays.binarySearch(starts, tombstone.start(), Arrays::compareUnsigned);
      for (int i = from; Arrays.compareUnsigned(starts[i], tombstone.end()) < 0; i++) {
        if (newest[i] == null || isNewer(tombstone.lsn(), tombstone.seq(), newest[i].lsn(), newest[i].seq())) newest[i] = tombstone;
      }
    }
  }

  boolean isEmpty() {
    return starts.length == 0;
  }

  /** Whether a version of this key is deleted; keys must not descend from call to call. */
  boolean deletes(KeyBlock keys, int row) {
    while (at < starts.length && keys.compare(row, starts[at]) >= 0) at++;
    if (at == 0 || newest[at - 1] == null) return false;
    RangeTombstone cover = newest[at - 1];
    return isNewer(cover.lsn(), cover.seq(), keys.lsn(row), keys.seq(row));
  }

  static boolean isNewer(long lsn, long seq, long otherLsn, long otherSeq) {
    return lsn != otherLsn ? lsn > otherLsn : seq > otherSeq;
  }
}
