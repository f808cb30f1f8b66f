package reef.spark;

import java.util.Set;
import java.util.TreeSet;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Which reader serves a DataFrame: the native one, unless an option asks for Python or needs it. */
enum Engine {
  JVM,
  PYTHON;

  private static final Logger LOG = LoggerFactory.getLogger(Engine.class);
  /** Options that only the Python reader obeys. */
  private static final Set<String> ONLY_PYTHON =
      new TreeSet<>(Set.of("where", "columns", "keys", "keyshex", "start", "end", "prefix", "starthex", "endhex", "prefixhex", "meter", "readchanges",
          "starting", "startinglsn", "startinggeneration", "startingsnapshot"));

  static Engine of(CaseInsensitiveStringMap options) {
    String wanted = options.getOrDefault("engine", "");
    switch (wanted) {
      case "python":
        return PYTHON;
      case "jvm":
      case "":
        break;
      default:
        throw new IllegalArgumentException("option engine=" + wanted + ": expected jvm or python");
    }
    for (String name : ONLY_PYTHON) {
      if (!options.containsKey(name)) continue;
      if (wanted.equals("jvm")) {
        throw new IllegalArgumentException("option " + name + " needs engine=python; the native reader takes Spark's own filters and columns");
      }
      LOG.info("Reef reads through Python, because the option {} is set", name);
      return PYTHON;
    }
    return JVM;
  }

  boolean isNative() {
    return this == JVM;
  }
}
