package reef.spark;

import java.io.IOException;

/**
 * Reads {@code LENGTH} bytes from {@code START} of a URL, as a task does: {@code UrlProbe URL START LENGTH}. Without them, says
 * whether the object exists.
 */
final class UrlProbe {
  public static void main(String[] args) throws IOException {
    ObjectLocation location = ObjectLocation.at("segments/a.seg", args[0], 1000);
    try (ObjectReader reader = ObjectReader.open(location)) {
      if (args.length == 1) {
        System.out.println(ObjectReader.exists(location) ? "exists" : "does not exist");
        return;
      }
      byte[] data = reader.read(Long.parseLong(args[1]), Integer.parseInt(args[2]));
      System.out.println("read " + data.length + " bytes from " + data[0] + " with " + reader.bytes.get());
    } catch (IOException error) {
      System.out.println("failed: " + error.getMessage());
    }
  }
}
