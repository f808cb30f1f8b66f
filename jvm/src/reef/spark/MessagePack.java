package reef.spark;

import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** Decodes the MessagePack subset that footers use, into maps, lists, strings, byte arrays and longs. */
final class MessagePack {
  private static final int DEPTH_MAX = 32;
  private final ByteBuffer in;

  private MessagePack(ByteBuffer in) {
    this.in = in;
  }

  @SuppressWarnings("unchecked")
  static Map<String, Object> decodeMap(byte[] data, int start, int length, String object, long offset) {
    try {
      return (Map<String, Object>) new MessagePack(ByteBuffer.wrap(data, start, length)).value(0);
    } catch (BufferUnderflowException | ClassCastException | IllegalArgumentException error) {
      throw new CorruptObjectException(object, offset, "footer is not a map: " + error);
    }
  }

  private Object value(int depth) {
    if (depth > DEPTH_MAX) throw new IllegalArgumentException("nested too deeply");
    int head = in.get() & 0xff;
    if (head < 0x80) return (long) head;
    if (head < 0x90) return map(head & 0x0f, depth);
    if (head < 0xa0) return list(head & 0x0f, depth);
    if (head < 0xc0) return text(head & 0x1f);
    if (head >= 0xe0) return (long) (byte) head;
    return switch (head) {
      case 0xc0 -> null;
      case 0xc2 -> Boolean.FALSE;
      case 0xc3 -> Boolean.TRUE;
      case 0xc4 -> bytes(in.get() & 0xff);
      case 0xc5 -> bytes(in.getShort() & 0xffff);
      case 0xc6 -> bytes(in.getInt());
      case 0xca -> (double) in.getFloat();
      case 0xcb -> in.getDouble();
      case 0xcc -> (long) (in.get() & 0xff);
      case 0xcd -> (long) (in.getShort() & 0xffff);
      case 0xce -> in.getInt() & 0xffffffffL;
      case 0xcf, 0xd3 -> in.getLong();
      case 0xd0 -> (long) in.get();
      case 0xd1 -> (long) in.getShort();
      case 0xd2 -> (long) in.getInt();
      case 0xd9 -> text(in.get() & 0xff);
      case 0xda -> text(in.getShort() & 0xffff);
      case 0xdb -> text(in.getInt());
      case 0xdc -> list(in.getShort() & 0xffff, depth);
      case 0xdd -> list(in.getInt(), depth);
      case 0xde -> map(in.getShort() & 0xffff, depth);
      case 0xdf -> map(in.getInt(), depth);
      default -> throw new IllegalArgumentException("type 0x" + Integer.toHexString(head));
    };
  }

  private byte[] bytes(int length) {
    if (length < 0 || length > in.remaining()) throw new BufferUnderflowException();
    byte[] data = new byte[length];
    in.get(data);
    return data;
  }

  private String text(int length) {
    return new String(bytes(length), StandardCharsets.UTF_8);
  }

  private List<Object> list(int count, int depth) {
    if (count < 0 || count > in.remaining()) throw new BufferUnderflowException();
    List<Object> items = new ArrayList<>(count);
    for (int i = 0; i < count; i++) items.add(value(depth + 1));
    return items;
  }

  private Map<String, Object> map(int count, int depth) {
    if (count < 0 || count > in.remaining()) throw new BufferUnderflowException();
    Map<String, Object> items = new HashMap<>(count * 2);
    for (int i = 0; i < count; i++) items.put((String) value(depth + 1), value(depth + 1));
    return items;
  }
}
