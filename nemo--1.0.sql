/* nemo--1.0.sql */

\echo Use "CREATE EXTENSION nemo" to load this file. \quit

CREATE FUNCTION nemo_table_handler(internal) RETURNS table_am_handler
AS 'MODULE_PATHNAME' LANGUAGE C STRICT;
CREATE FUNCTION nemo_index_handler(internal) RETURNS index_am_handler
AS 'MODULE_PATHNAME' LANGUAGE C STRICT;

CREATE ACCESS METHOD nemo TYPE TABLE HANDLER nemo_table_handler;
COMMENT ON ACCESS METHOD nemo IS 'rows in an ordered key-value store, cached record by record';
CREATE ACCESS METHOD nemo_index TYPE INDEX HANDLER nemo_index_handler;
COMMENT ON ACCESS METHOD nemo_index IS 'ordered index on a nemo table';

-- One default operator class that resolves for any type, and mirrors of the btree ones by name: they only serve name
-- resolution in "USING nemo_index"; the index itself is given the btree operator class of the same name.
CREATE OPERATOR CLASS nemo_any_ops DEFAULT FOR TYPE anyelement USING nemo_index AS STORAGE anyelement;
DO $$
DECLARE
  r record;
BEGIN
  FOR r IN
    SELECT n.nspname, c.opcname, c.opcintype::regtype AS t
      FROM pg_opclass c
      JOIN pg_namespace n ON n.oid = c.opcnamespace
      JOIN pg_am a ON a.oid = c.opcmethod
     WHERE a.amname = 'btree'
  LOOP
    EXECUTE format('CREATE OPERATOR CLASS %I.%I FOR TYPE %s USING nemo_index AS STORAGE %s',
                   r.nspname, r.opcname, r.t, r.t);
  END LOOP;
END $$;

CREATE FUNCTION nemo_key(anyelement, descending boolean DEFAULT false, nulls_first boolean DEFAULT false) RETURNS bytea
AS 'MODULE_PATHNAME', 'nemo_key_sql' LANGUAGE C STABLE;
COMMENT ON FUNCTION nemo_key(anyelement, boolean, boolean) IS 'key bytes of a value in a nemo_index';

CREATE FUNCTION nemo_stat_buffer(
  OUT size_bytes bigint, OUT used_bytes bigint, OUT entries bigint, OUT tombstones bigint, OUT dirty bigint,
  OUT lookups bigint, OUT hits bigint, OUT tombstone_hits bigint, OUT gap_hits bigint, OUT misses bigint,
  OUT range_lookups bigint, OUT range_hits bigint, OUT range_fetches bigint,
  OUT admitted bigint, OUT evicted bigint, OUT flushed bigint,
  OUT key_bytes bigint, OUT value_bytes bigint, OUT overhead_per_entry double precision)
AS 'MODULE_PATHNAME' LANGUAGE C STRICT VOLATILE;
CREATE VIEW nemo_stat_buffer AS SELECT * FROM nemo_stat_buffer();

CREATE FUNCTION nemo_stat_store(
  OUT operation text, OUT requests bigint, OUT keys bigint, OUT bytes_sent bigint, OUT bytes_received bigint,
  OUT errors bigint, OUT retries bigint, OUT p50_us bigint, OUT p99_us bigint) RETURNS SETOF record
AS 'MODULE_PATHNAME' LANGUAGE C STRICT VOLATILE;
CREATE VIEW nemo_stat_store AS SELECT * FROM nemo_stat_store();

CREATE FUNCTION nemo_stat_checkpoint(
  OUT checkpoint_lsn pg_lsn, OUT insert_lsn pg_lsn, OUT lag_bytes bigint, OUT dirty bigint)
AS 'MODULE_PATHNAME' LANGUAGE C STRICT VOLATILE;
CREATE VIEW nemo_stat_checkpoint AS SELECT * FROM nemo_stat_checkpoint();

CREATE FUNCTION nemo_stat_reset() RETURNS void
AS 'MODULE_PATHNAME' LANGUAGE C STRICT VOLATILE;
CREATE FUNCTION nemo_checkpoint() RETURNS void
AS 'MODULE_PATHNAME' LANGUAGE C STRICT VOLATILE;
CREATE FUNCTION nemo_evict(regclass) RETURNS void
AS 'MODULE_PATHNAME' LANGUAGE C STRICT VOLATILE;

CREATE FUNCTION nemo_verify(regclass, OUT relation text, OUT key bytea, OUT problem text) RETURNS SETOF record
AS 'MODULE_PATHNAME' LANGUAGE C STRICT VOLATILE;
COMMENT ON FUNCTION nemo_verify(regclass) IS 'differences between rows, index entries, rowid map and store';

GRANT SELECT ON nemo_stat_buffer, nemo_stat_store, nemo_stat_checkpoint TO PUBLIC;
REVOKE EXECUTE ON FUNCTION nemo_stat_reset(), nemo_checkpoint(), nemo_evict(regclass), nemo_verify(regclass)
  FROM PUBLIC;
