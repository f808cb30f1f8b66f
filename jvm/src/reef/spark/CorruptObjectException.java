package reef.spark;

/** Bytes of an object contradict a checksum, a length or their own structure. */
final class CorruptObjectException extends RuntimeException {
  CorruptObjectException(String object, long offset, String problem) {
    super("object " + object + ", offset " + offset + ": " + problem + " (run reef verify, then reef repair)");
  }
}
