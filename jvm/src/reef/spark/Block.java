package reef.spark;

import com.github.luben.zstd.ZstdDecompressCtx;
import com.github.luben.zstd.ZstdException;
import java.util.zip.CRC32C;
import net.jpountz.lz4.LZ4Exception;
import net.jpountz.lz4.LZ4Factory;
import net.jpountz.lz4.LZ4SafeDecompressor;
import org.apache.spark.unsafe.Platform;

/**
 * Payload of a checked and decompressed block. The layout is that of docs/format/segment.md:
 * u32 length, u32 crc32c, u8 kind, u8 codec, u16 zero, u32 raw length, payload, padding.
 */
record Block(byte[] data, int start, int length) {
  static final int KEYS = 1;
  static final int COLUMN = 2;
  static final int RANGE_TOMBSTONES = 3;
  static final int FILTER = 4;
  static final int INDEX = 5;
  static final int PAGES = 7;
  static final int HEAD_BYTES = 16;

  private static final int NONE = 0;
  private static final int LZ4 = 1;
  private static final int ZSTD = 2;
  private static final LZ4SafeDecompressor LZ4_BLOCKS = LZ4Factory.fastestInstance().safeDecompressor();
  /** To create a context takes as long as to decompress a page. */
  private static final ThreadLocal<ZstdDecompressCtx> ZSTD_CONTEXT = ThreadLocal.withInitial(ZstdDecompressCtx::new);
  private static final long RATIO_MAX = 1024;
  private static final long RATIO_SLACK_BYTES = 64 * 1024;

  /** Decodes the block that is exactly {@code data[start, start + size)}; {@code offset} is its place in the object. */
  static Block decode(byte[] data, int start, int size, int kind, String object, long offset) {
    if (size < HEAD_BYTES || start < 0 || start + size > data.length) {
      throw new CorruptObjectException(object, offset, "a block of " + size + " bytes");
    }
    long length = u32(data, start);
    if (length + (-length & 7) != size - HEAD_BYTES) {
      throw new CorruptObjectException(object, offset, "block length is " + length + ", expected to fill " + size + " bytes");
    }
    CRC32C sum = new CRC32C();
    sum.update(data, start + 8, size - 8);
    if (sum.getValue() != u32(data, start + 4)) {
      throw new CorruptObjectException(object, offset, "checksum of the block does not match");
    }
    int codec = data[start + 9];
    long rawLength = u32(data, start + 12);
    if (data[start + 8] != kind || data[start + 10] != 0 || data[start + 11] != 0) {
      throw new CorruptObjectException(object, offset, "block kind is " + data[start + 8] + ", expected " + kind);
    }
    if (rawLength > length * RATIO_MAX + RATIO_SLACK_BYTES || rawLength > Integer.MAX_VALUE - 16) {
      throw new CorruptObjectException(object, offset, "block of " + length + " bytes claims to hold " + rawLength);
    }
    int payload = start + HEAD_BYTES;
    return switch (codec) {
      case NONE -> new Block(data, payload, (int) length);
      case LZ4 -> new Block(lz4(data, payload, (int) length, (int) rawLength, object, offset), 0, (int) rawLength);
      case ZSTD -> new Block(zstd(data, payload, (int) length, (int) rawLength, object, offset), 0, (int) rawLength);
      default -> throw new CorruptObjectException(object, offset, "unknown codec " + codec);
    };
  }

  private static byte[] zstd(byte[] data, int start, int length, int rawLength, String object, long offset) {
    byte[] raw = new byte[rawLength];
    try {
      long size = ZSTD_CONTEXT.get().decompressByteArray(raw, 0, rawLength, data, start, length);
      if (size == rawLength) return raw;
    } catch (ZstdException error) {
      throw new CorruptObjectException(object, offset, "block does not decompress: " + error.getMessage());
    }
    throw new CorruptObjectException(object, offset, "block does not decompress to " + rawLength + " bytes");
  }

  private static byte[] lz4(byte[] data, int start, int length, int rawLength, String object, long offset) {
    byte[] raw = new byte[rawLength];
    try {
      int size = LZ4_BLOCKS.decompress(data, start, length, raw, 0, rawLength);
      if (size == rawLength) return raw;
    } catch (LZ4Exception error) {
      throw new CorruptObjectException(object, offset, "block does not decompress: " + error.getMessage());
    }
    throw new CorruptObjectException(object, offset, "block does not decompress to " + rawLength + " bytes");
  }

  static long u32(byte[] data, int at) {
    return Platform.getInt(data, Platform.BYTE_ARRAY_OFFSET + at) & 0xffffffffL;
  }
}
