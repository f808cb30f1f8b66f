package reef.spark;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.util.Map;

/**
 * Says whether planned states are still the newest. Each line of the input is a plan, which is kept, or empty, which asks
 * about the one that is kept: the response is a line with true or false.
 */
final class StateProbe {
  public static void main(String[] args) throws IOException {
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, java.nio.charset.StandardCharsets.UTF_8));
    PinnedState state = null;
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      if (!line.isEmpty()) state = new PinnedState(new ObjectMapper().readTree(line), Map.of(), new Stopwatch());
      System.out.println(state.isNewest());
    }
    System.exit(0); // the thread of the leases is idle
  }
}
