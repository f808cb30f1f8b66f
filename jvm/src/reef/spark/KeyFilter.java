package reef.spark;

import java.util.Arrays;
import org.apache.spark.unsafe.Platform;

/**
 * The key filter of a segment: proves that it has no version of a key (docs/format/segment.md). In split blocks of eight
 * 32-bit words, each key has one bit in every word of one block.
 */
final class KeyFilter {
  private static final int BLOCK_BYTES = 32;
  private static final int[] ODD = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD6E8FEB9, 0xA5CB9243, 0x5851F42D};

  private final Block block;

  KeyFilter(Block block, String object, long offset) {
    this.block = block;
    if (block.length() == 0 || block.length() % BLOCK_BYTES != 0) {
      throw new CorruptObjectException(object, offset, block.length() + " bytes are not a filter");
    }
  }

  /** Returns the keys of a list that the segment may have, in the same order. */
  byte[][] among(byte[][] keys) {
    return Arrays.stream(keys).filter(this::mayHave).toArray(byte[][]::new);
  }

  boolean mayHave(byte[] key) {
    if (key.length > KeyHash.LENGTH_MAX) return true;
    long hash = KeyHash.of(key);
    long number = (hash >>> 32) * (block.length() / BLOCK_BYTES) >>> 32;
    long start = Platform.BYTE_ARRAY_OFFSET + block.start() + number * BLOCK_BYTES;
    for (int word = 0; word < ODD.length; word++) {
      int bit = (int) hash * ODD[word] >>> 27;
      if ((Platform.getInt(block.data(), start + 4L * word) >>> bit & 1) == 0) return false;
    }
    return true;
  }
}
