package reef.spark;

import java.util.HexFormat;

/** Prints the hashes of keys, which are given in hexadecimal digits after an x, as unsigned numbers. */
final class HashProbe {
  public static void main(String[] args) {
    for (String key : args) System.out.println(Long.toUnsignedString(KeyHash.of(HexFormat.of().parseHex(key.substring(1)))));
  }
}
