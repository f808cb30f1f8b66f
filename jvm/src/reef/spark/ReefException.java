package reef.spark;

import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.spark.QueryContext;
import org.apache.spark.SparkRuntimeException;
import org.apache.spark.sql.AnalysisException;
import scala.jdk.javaapi.CollectionConverters;

/** An error that Python has reported, as Spark's own kind of error: with the name of its class and its kind. */
final class ReefException extends AnalysisException {
  private static final Pattern IN_TRACEBACK = Pattern.compile("reef\\.errors\\.(\\w+): (.+)");

  final String error;
  final String kind;

  ReefException(String error, String kind, String message) {
    super("PYTHON_DATA_SOURCE_ERROR", parameters("reef.errors." + error + ": " + message));
    this.error = error;
    this.kind = kind;
  }

  private static scala.collection.immutable.Map<String, String> parameters(String message) {
    Map<String, String> parameters = Map.of("action", "plan", "type", "reef", "msg", message);
    return scala.collection.immutable.Map.from(CollectionConverters.asScala(parameters));
  }

  /** Throws an error of the Python sink again: as a ReefException without its traceback, if it is one of Reef. */
  static RuntimeException from(Throwable cause) {
    Matcher found = IN_TRACEBACK.matcher(String.valueOf(cause.getMessage()));
    String error = null;
    String message = null;
    while (found.find()) { // the last line of a traceback names the error
      error = found.group(1);
      message = found.group(2);
    }
    throw ReefException.<RuntimeException>sneaky(error == null ? cause : new ReefException(error, "", message));
  }

  /** An error about a row, in a task: of a class that Spark shows without a stack. */
  static SparkRuntimeException ofRow(String message) {
    Map<String, String> parameters = Map.of("errorMessage", "reef.errors.InvalidInputError: " + message);
    return new SparkRuntimeException(
        "USER_RAISED_EXCEPTION", scala.collection.immutable.Map.from(CollectionConverters.asScala(parameters)), null, new QueryContext[0], "");
  }

  boolean isNotFound() {
    return error.equals("NotFoundError");
  }

  /** Throws it from methods of Spark's interfaces that declare no checked exceptions. */
  RuntimeException unchecked() {
    throw ReefException.<RuntimeException>sneaky(this);
  }

  @SuppressWarnings("unchecked")
  static <T extends Throwable> T sneaky(Throwable error) throws T {
    throw (T) error;
  }
}
