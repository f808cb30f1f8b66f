package reef.spark;

import java.io.Serializable;

/** Where an object is: a file: or https: URL, or a stretch of its bytes. */
final class ObjectLocation implements Serializable {
  final String name;
  final String url;
  final long size;
  final byte[] inline;
  final long inlineStart;

  private ObjectLocation(String name, String url, long size, byte[] inline, long inlineStart) {
    this.name = name;
    this.url = url;
    this.size = size;
    this.inline = inline;
    this.inlineStart = inlineStart;
  }

  static ObjectLocation at(String name, String url, long size) {
    return new ObjectLocation(name, url, size, null, 0);
  }

  static ObjectLocation inline(String name, byte[] data) {
    return new ObjectLocation(name, "", data.length, data, 0);
  }

  /** The same object, with only [start, end) of its inline bytes; others are returned as they are. */
  ObjectLocation slice(long start, long end) {
    if (inline == null) return this;
    byte[] part = java.util.Arrays.copyOfRange(inline, (int) (start - inlineStart), (int) (end - inlineStart));
    return new ObjectLocation(name, url, size, part, start);
  }
}
