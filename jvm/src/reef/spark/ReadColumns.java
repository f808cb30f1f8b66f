package reef.spark;

import java.io.Serializable;
import org.apache.spark.sql.types.StructType;

/** The columns of a scan: field numbers in the order of Spark's read schema, with the table's types. */
record ReadColumns(StructType schema, int[] fields, ReefType[] types) implements Serializable {
  /** The key column has this number; all others count from 1. */
  static final int KEY = 0;
  /** Denotes the expiry of a row, which key blocks have. */
  static final int EXPIRES_AT = -1;

  int size() {
    return fields.length;
  }
}
