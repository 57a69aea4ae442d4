-- demo.sql: the main job on a fresh cluster, with what it cost the record buffer and the store.
\pset footer off
CREATE EXTENSION nemo;
CREATE TABLE account (id bigint PRIMARY KEY, owner text NOT NULL, balance numeric NOT NULL) USING nemo;
CREATE INDEX account_owner ON account (owner);

INSERT INTO account SELECT g, 'owner ' || g % 1000, 100 FROM generate_series(2, 200000, 2) g;
UPDATE account SET balance = balance + 1 WHERE owner = 'owner 4';
DELETE FROM account WHERE id BETWEEN 1000 AND 1100;

CREATE TEMP TABLE cost (step text, rows bigint, hits bigint, negative_hits bigint, misses bigint, requests bigint);
CREATE FUNCTION pg_temp.measure(step text, query text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  n bigint;
BEGIN
  PERFORM nemo_stat_reset();
  EXECUTE 'SELECT count(*) FROM (' || query || ') q' INTO n;
  INSERT INTO cost
    SELECT step, n, b.hits + b.range_hits, b.tombstone_hits + b.gap_hits, b.misses + b.range_fetches,
           (SELECT sum(requests) FROM nemo_stat_store WHERE operation IN ('get', 'get_range'))
      FROM nemo_stat_buffer b;
END $$;

\o /dev/null
SELECT nemo_checkpoint(), nemo_evict('account');
\o
SELECT pg_temp.measure('cold key', 'SELECT * FROM account WHERE id = 5000'),
       pg_temp.measure('hot key', 'SELECT * FROM account WHERE id = 5000'),
       pg_temp.measure('absent key', 'SELECT * FROM account WHERE id = 5001'),
       pg_temp.measure('absent key again', 'SELECT * FROM account WHERE id = 5001'),
       pg_temp.measure('100 cold keys',
                       'SELECT * FROM account WHERE id = ANY (ARRAY(SELECT g * 1000 FROM generate_series(10, 109) g))'),
       pg_temp.measure('cold range', 'SELECT * FROM account WHERE id BETWEEN 150000 AND 150200'),
       pg_temp.measure('part of it again', 'SELECT * FROM account WHERE id BETWEEN 150050 AND 150100'),
       pg_temp.measure('by secondary index', 'SELECT * FROM account WHERE owner = ''owner 4''') \gset discard_
\echo
\echo 'What each query cost (rows read, served from memory, known absent, not in memory, requests to the store):'
SELECT * FROM cost;
SELECT count(*) AS rows, sum(balance) AS balance FROM account;
