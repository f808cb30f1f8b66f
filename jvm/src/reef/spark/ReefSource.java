package reef.spark;

import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SQLContext;
import org.apache.spark.sql.SaveMode;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.catalyst.util.DateTimeUtils;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.sources.BaseRelation;
import org.apache.spark.sql.sources.CreatableRelationProvider;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.unsafe.types.UTF8String;
import scala.jdk.javaapi.CollectionConverters;

/**
 * {@code format("reef")}. Takes precedence over the Python source of that name, which it uses for planning and writing,
 * and for reading where the option {@code engine} is {@code python}.
 *
 * <p>Spark allows sources of this kind the save modes append and overwrite only. A source whose table cannot be written
 * is asked by its older interface instead, with the mode. So {@code df.write} arrives at {@code createRelation}, which
 * decides by the mode and writes with the option {@code reef.save}, under which the table can be written.
 */
public final class ReefSource implements TableProvider, CreatableRelationProvider, DataSourceRegister {
  static final String SAVE = "reef.save";
  private static final String VERSION = "versionAsOf";
  private static final String TIMESTAMP = "timestampAsOf";

  private PythonDataSourceV2 python;
  private boolean isRead;

  @Override
  public String shortName() {
    return "reef";
  }

  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap given) {
    isRead = true;
    CaseInsensitiveStringMap options = withVersion(given);
    if (!Engine.of(options).isNative()) return pythonSchema(options);
    return ReefTable.describe(options.asCaseSensitiveMap()).schema().spark();
  }

  private StructType pythonSchema(CaseInsensitiveStringMap options) {
    try {
      return python().inferSchema(options);
    } catch (Throwable error) { // the error of Reef, without the traceback
      throw ReefException.from(error);
    }
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    CaseInsensitiveStringMap options = withVersion(new CaseInsensitiveStringMap(properties));
    if (!Engine.of(options).isNative()) return python().getTable(schema, partitioning, options.asCaseSensitiveMap());
    boolean isWritable = isRead || options.containsKey(SAVE);
    return new ReefTable(name(options), options.asCaseSensitiveMap(), schema, Map.of("provider", "reef"), isWritable);
  }

  /** Translates Spark's options for time travel, which are those of other table formats too. */
  private static CaseInsensitiveStringMap withVersion(CaseInsensitiveStringMap options) {
    Map<String, String> given = new HashMap<>(options.asCaseSensitiveMap());
    given.keySet().removeIf(option -> option.equalsIgnoreCase(VERSION) || option.equalsIgnoreCase(TIMESTAMP));
    if (options.containsKey(VERSION)) given.putAll(ReefCatalog.version(options.get(VERSION)));
    if (options.containsKey(TIMESTAMP)) given.put("asOfTime", instant(options.get(TIMESTAMP)));
    return new CaseInsensitiveStringMap(given);
  }

  /** A time as Spark reads it: without a zone it is in that of the session. */
  private static String instant(String text) {
    var zone = DateTimeUtils.getZoneId(SQLConf.get().sessionLocalTimeZone());
    var micros = DateTimeUtils.stringToTimestamp(UTF8String.fromString(text), zone);
    return micros.isEmpty() ? text : DateTimeUtils.microsToInstant((Long) micros.get()).toString();
  }

  private static String name(CaseInsensitiveStringMap options) {
    return options.getOrDefault("namespace", "?") + " in " + options.getOrDefault("path", "?");
  }

  @Override
  public BaseRelation createRelation(SQLContext context, SaveMode mode, scala.collection.immutable.Map<String, String> parameters, Dataset<Row> data) {
    CaseInsensitiveStringMap options = new CaseInsensitiveStringMap(CollectionConverters.asJava(parameters));
    Map<String, String> given = new HashMap<>(options.asCaseSensitiveMap());
    given.put(SAVE, "true");
    boolean isNew = mode == SaveMode.ErrorIfExists || mode == SaveMode.Ignore;
    if (isNew) given.put("createOnly", "true");
    if (!isNew || isMissing(options, mode)) {
      data.write().format("reef").options(given).mode(mode == SaveMode.Overwrite ? mode : SaveMode.Append).save();
    }
    return new Saved(context, data.schema());
  }

  private static boolean isMissing(CaseInsensitiveStringMap options, SaveMode mode) {
    Map<String, String> place = new HashMap<>();
    options.asCaseSensitiveMap().forEach((name, value) -> {
      if (name.equals("path") || name.equals("namespace") || name.startsWith("store.")) place.put(name, value);
    });
    boolean exists = Planner.call(place, Planner.request("exists")).get("exists").asBoolean();
    if (exists && mode == SaveMode.ErrorIfExists) {
      String[] path = {options.getOrDefault("path", "?")};
      throw ReefException.sneaky(new TableAlreadyExistsException(Identifier.of(path, options.get("namespace"))));
    }
    return !exists;
  }

  /** The result of a write, which Spark does not read. */
  private static final class Saved extends BaseRelation {
    private final SQLContext context;
    private final StructType schema;

    Saved(SQLContext context, StructType schema) {
      this.context = context;
      this.schema = schema;
    }

    @Override public SQLContext sqlContext() { return context; }
    @Override public StructType schema() { return schema; }
  }

  /** One Python source per DataFrame: it keeps what it has pinned. */
  private PythonDataSourceV2 python() {
    if (python == null) python = Planner.python();
    return python;
  }
}
