package reef.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Calls reef.spark.planner in a Python worker of the driver. A request travels as an option of the Python data source,
 * and the response as metadata of the schema that it returns; Spark reuses the worker.
 */
final class Planner {
  static final String REQUEST = "reef.request";
  private static final ObjectMapper JSON = new ObjectMapper();

  private Planner() {}

  static ObjectNode request(String operation) {
    return JSON.createObjectNode().put("operation", operation);
  }

  /** Returns the response; a ReefError of Python is thrown as a ReefException, unchecked. */
  static JsonNode call(Map<String, String> options, ObjectNode request) {
    Map<String, String> sent = new HashMap<>(options);
    sent.put(REQUEST, request.toString());
    StructType response = python().inferSchema(new CaseInsensitiveStringMap(sent));
    try {
      JsonNode json = JSON.readTree(response.fields()[0].metadata().getString("response"));
      if (json.has("error")) {
        throw new ReefException(json.get("error").asText(), json.path("kind").asText(), json.get("message").asText()).unchecked();
      }
      return json;
    } catch (JsonProcessingException error) {
      throw new IllegalStateException("reef.spark.planner returned no JSON", error);
    }
  }

  static PythonDataSourceV2 python() {
    PythonDataSourceV2 source = new PythonDataSourceV2();
    source.setShortName("reef");
    return source;
  }
}
