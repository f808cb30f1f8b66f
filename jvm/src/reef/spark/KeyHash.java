package reef.spark;

import java.util.HexFormat;
import org.apache.spark.unsafe.Platform;

/** The hash of keys in filters: xxh3 of 64 bits without a seed, of keys up to 240 bytes. */
final class KeyHash {
  static final int LENGTH_MAX = 240;
  private static final byte[] SECRET = HexFormat.of().parseHex(
      "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
          + "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
          + "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e");
  private static final long PRIME_1 = 0x9E3779B185EBCA87L;
  private static final long PRIME_2 = 0xC2B2AE3D27D4EB4FL;
  private static final long PRIME_3 = 0x165667B19E3779F9L;
  private static final long SHORT = 0x9FB21C651E98DF25L;
  private static final long LONG = 0x165667919E3779F9L;

  private KeyHash() {}

  static long of(byte[] key) {
    int length = key.length;
    if (length > 128) return upTo240(key);
    if (length > 16) return upTo128(key);
    if (length > 8) return upTo16(key);
    if (length > 3) return upTo8(key);
    if (length > 0) return upTo3(key);
    return mixed64(u64(SECRET, 56) ^ u64(SECRET, 64));
  }

  private static long upTo3(byte[] key) {
    int length = key.length;
    long combined = (key[0] & 0xffL) << 16 | (key[length >> 1] & 0xffL) << 24 | key[length - 1] & 0xffL | (long) length << 8;
    return mixed64(combined ^ u32(SECRET, 0) ^ u32(SECRET, 4));
  }

  private static long upTo8(byte[] key) {
    long both = u32(key, key.length - 4) + (u32(key, 0) << 32);
    long hash = both ^ u64(SECRET, 8) ^ u64(SECRET, 16);
    hash ^= Long.rotateLeft(hash, 49) ^ Long.rotateLeft(hash, 24);
    hash *= SHORT;
    hash ^= (hash >>> 35) + key.length;
    hash *= SHORT;
    return hash ^ hash >>> 28;
  }

  private static long upTo16(byte[] key) {
    long low = u64(key, 0) ^ u64(SECRET, 24) ^ u64(SECRET, 32);
    long high = u64(key, key.length - 8) ^ u64(SECRET, 40) ^ u64(SECRET, 48);
    return mixed(key.length + Long.reverseBytes(low) + high + folded(low, high));
  }

  private static long upTo128(byte[] key) {
    long sum = key.length * PRIME_1;
    for (int i = (key.length - 1) / 32; i >= 0; i--) {
      sum += of16(key, 16 * i, 32 * i) + of16(key, key.length - 16 * (i + 1), 32 * i + 16);
    }
    return mixed(sum);
  }

  private static long upTo240(byte[] key) {
    long sum = key.length * PRIME_1;
    for (int i = 0; i < 8; i++) sum += of16(key, 16 * i, 16 * i);
    sum = mixed(sum) + of16(key, key.length - 16, 136 - 17);
    for (int i = 8; i < key.length / 16; i++) sum += of16(key, 16 * i, 16 * (i - 8) + 3);
    return mixed(sum);
  }

  private static long of16(byte[] key, int at, int secret) {
    return folded(u64(key, at) ^ u64(SECRET, secret), u64(key, at + 8) ^ u64(SECRET, secret + 8));
  }

  /** The product in 128 bits, its halves combined. */
  private static long folded(long a, long b) {
    long high = Math.multiplyHigh(a, b) + (a >> 63 & b) + (b >> 63 & a); // of unsigned numbers
    return a * b ^ high;
  }

  private static long mixed(long hash) {
    hash ^= hash >>> 37;
    hash *= LONG;
    return hash ^ hash >>> 32;
  }

  private static long mixed64(long hash) {
    hash ^= hash >>> 33;
    hash *= PRIME_2;
    hash ^= hash >>> 29;
    hash *= PRIME_3;
    return hash ^ hash >>> 32;
  }

  private static long u64(byte[] data, int at) {
    return Platform.getLong(data, Platform.BYTE_ARRAY_OFFSET + at);
  }

  private static long u32(byte[] data, int at) {
    return Platform.getInt(data, Platform.BYTE_ARRAY_OFFSET + at) & 0xffffffffL;
  }
}
