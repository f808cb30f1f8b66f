package reef.spark;

import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

/**
 * Holds the tail of a segment many times, as plans of large tables do: {@code TailProbe URL SIZE TAIL_BYTES TIMES}. Prints how
 * many keys of two the last one may have: its own first key, and another one.
 */
final class TailProbe {
  public static void main(String[] args) throws IOException {
    long size = Long.parseLong(args[1]);
    List<SegmentTail> held = new ArrayList<>();
    for (int i = 0; i < Integer.parseInt(args[3]); i++) {
      try (ObjectReader reader = ObjectReader.open(ObjectLocation.at("a segment", args[0], size))) {
        held.add(SegmentTail.read(reader, size, Integer.parseInt(args[2])));
      }
    }
    SegmentTail last = held.get(held.size() - 1);
    System.out.println(last.mayHave(new byte[][] {last.firstKeys[0], "absent".getBytes()}).length);
  }
}
