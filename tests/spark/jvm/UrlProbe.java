package reef.spark;

import java.io.IOException;

/** Reads {@code LENGTH} bytes from {@code START} of a URL, as a task does: {@code UrlProbe URL START LENGTH}. */
final class UrlProbe {
  public static void main(String[] args) throws IOException {
    try (ObjectReader reader = ObjectReader.open(ObjectLocation.at("segments/a.seg", args[0], 1000))) {
      byte[] data = reader.read(Long.parseLong(args[1]), Integer.parseInt(args[2]));
      System.out.println("read " + data.length + " bytes from " + data[0] + " with " + reader.bytes.get());
    } catch (IOException error) {
      System.out.println("failed: " + error.getMessage());
    }
  }
}
