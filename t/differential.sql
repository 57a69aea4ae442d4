-- differential.sql: run once with default_table_access_method = heap and once with nemo; the output must be equal.
\set ON_ERROR_STOP 0
\set VERBOSITY default
\set SHOW_CONTEXT never
\pset null '~'
SET client_min_messages = warning;

\echo == plain table without a key
CREATE TABLE p (a int, b text, c numeric);
INSERT INTO p SELECT g, 'row ' || g, g / 3.0 FROM generate_series(1, 300) g;
SELECT count(*), sum(a), min(b), max(b), sum(c) FROM p;
WITH x AS (UPDATE p SET b = b || '!' WHERE a % 7 = 0 RETURNING a, b) SELECT * FROM x ORDER BY 1;
WITH x AS (DELETE FROM p WHERE a BETWEEN 10 AND 20 RETURNING *) SELECT * FROM x ORDER BY 1;
SELECT * FROM p WHERE a < 30 ORDER BY a;
UPDATE p SET a = a + 1;
SELECT count(*), sum(a), min(a), max(a) FROM p;
INSERT INTO p SELECT a + 1000, b, c FROM p;
SELECT count(*), sum(a), min(a), max(a) FROM p;
DELETE FROM p x USING p y WHERE x.a = y.a + 1000;
SELECT count(*), sum(a) FROM p;
UPDATE p SET c = NULL, b = NULL WHERE a = 50 RETURNING *;
SELECT * FROM p WHERE c IS NULL ORDER BY 1;
WITH x AS (DELETE FROM p WHERE ctid IN (SELECT ctid FROM p ORDER BY a LIMIT 5) RETURNING a) SELECT * FROM x ORDER BY 1;
UPDATE p SET b = 'by ctid' WHERE ctid = (SELECT ctid FROM p WHERE a = 60) RETURNING *;
DELETE FROM p x USING p y WHERE x.ctid = y.ctid AND x.a = 61 RETURNING x.a, y.b;
TRUNCATE p;
SELECT count(*) FROM p;
INSERT INTO p VALUES (1, 'one', 1), (2, 'two', 2), (3, NULL, NULL) RETURNING *;
ALTER TABLE p ADD COLUMN d int DEFAULT 7;
SELECT * FROM p ORDER BY a;
WITH x AS (UPDATE p SET d = d + a RETURNING *) SELECT * FROM x ORDER BY 1;
ALTER TABLE p DROP COLUMN b;
INSERT INTO p VALUES (4, 4, 4) RETURNING *;
ALTER TABLE p ALTER COLUMN a TYPE bigint;
SELECT * FROM p ORDER BY a;
ALTER TABLE p ADD COLUMN e timestamptz DEFAULT '2020-01-01 00:00+00';
SELECT a, d, e AT TIME ZONE 'UTC' FROM p ORDER BY a;
DROP TABLE p;

\echo == integer primary key
CREATE TABLE k (id int PRIMARY KEY, v text, n int);
INSERT INTO k SELECT g, 'v' || g, g % 10 FROM generate_series(1, 200) g;
INSERT INTO k VALUES (5, 'dup', 0);
INSERT INTO k VALUES (NULL, 'null', 0);
INSERT INTO k VALUES (500, 'a', 0), (501, 'b', 0), (500, 'c', 0);
SELECT * FROM k WHERE id = 500;
INSERT INTO k VALUES (-5, 'negative', 0), (-2147483648, 'least', 0), (2147483647, 'most', 0), (0, 'zero', 0);
SELECT * FROM k WHERE id <= 3 ORDER BY id;
SELECT * FROM k WHERE id > 197 ORDER BY id DESC;
SELECT * FROM k WHERE id IN (7, -5, 9, 9, 100000) ORDER BY id;
SELECT * FROM k WHERE id BETWEEN 40 AND 45 ORDER BY id DESC;
SELECT * FROM k WHERE id > 40 AND id < 45 ORDER BY id LIMIT 2;
UPDATE k SET v = 'changed' WHERE id = 5 RETURNING *;
UPDATE k SET id = 1000 WHERE id = 6 RETURNING *;
UPDATE k SET id = 7 WHERE id = 8;
UPDATE k SET id = id + 5000 WHERE id BETWEEN 11 AND 15 RETURNING *;
SELECT id, v FROM k WHERE id IN (6, 7, 8, 11, 1000, 5011) ORDER BY id;
UPDATE k SET id = -id WHERE id IN (-5, 21) RETURNING *;
DELETE FROM k WHERE id = 30;
INSERT INTO k VALUES (30, 'again', 3);
SELECT * FROM k WHERE id = 30;
DELETE FROM k WHERE n = 3;
SELECT count(*), sum(id::bigint) FROM k;
UPDATE k SET n = n + 1 WHERE id < 100;
SELECT n, count(*) FROM k GROUP BY n ORDER BY n;
SELECT count(*) FROM k a JOIN k b ON a.id = b.id::bigint + 1;
SELECT a.id FROM k a WHERE EXISTS (SELECT 1 FROM k b WHERE b.id = a.id::bigint * 2) ORDER BY 1 LIMIT 10;
SELECT max(id), min(id) FROM k;
UPDATE k SET id = id WHERE id = 40 RETURNING *;
BEGIN;
DELETE FROM k WHERE id = 41;
INSERT INTO k VALUES (41, 'reborn', 1);
UPDATE k SET v = v || '!' WHERE id = 41;
SELECT * FROM k WHERE id = 41;
ROLLBACK;
SELECT * FROM k WHERE id = 41;

\echo == savepoints
BEGIN;
INSERT INTO k VALUES (600, 'outer', 1);
SAVEPOINT a;
INSERT INTO k VALUES (601, 'inner', 1);
UPDATE k SET v = 'inner' WHERE id = 600;
DELETE FROM k WHERE id = 42;
SELECT id, v FROM k WHERE id IN (42, 600, 601) ORDER BY 1;
ROLLBACK TO a;
SELECT id, v FROM k WHERE id IN (42, 600, 601) ORDER BY 1;
SAVEPOINT b;
UPDATE k SET v = 'b' WHERE id = 600;
RELEASE b;
SAVEPOINT c;
INSERT INTO k VALUES (600, 'dup', 1);
ROLLBACK TO c;
UPDATE k SET v = v || 'c' WHERE id = 600 RETURNING *;
COMMIT;
SELECT id, v FROM k WHERE id IN (42, 600, 601) ORDER BY 1;
BEGIN;
SAVEPOINT s1; INSERT INTO k VALUES (610, 's1', 1);
SAVEPOINT s2; INSERT INTO k VALUES (611, 's2', 1);
SAVEPOINT s3; UPDATE k SET v = 's3' WHERE id IN (610, 611);
ROLLBACK TO s2;
SELECT id, v FROM k WHERE id >= 610 AND id <= 620 ORDER BY 1;
INSERT INTO k VALUES (611, 'again', 1);
COMMIT;
SELECT id, v FROM k WHERE id >= 610 AND id <= 620 ORDER BY 1;
DO $$
BEGIN
  FOR i IN 1..40 LOOP
    BEGIN
      UPDATE k SET n = n + 1 WHERE id = 50;
      IF i % 3 = 0 THEN RAISE EXCEPTION 'undo'; END IF;
    EXCEPTION WHEN raise_exception THEN NULL;
    END;
  END LOOP;
END $$;
SELECT n FROM k WHERE id = 50;

\echo == cursors
BEGIN;
DECLARE c CURSOR FOR SELECT id, v FROM k WHERE id BETWEEN 60 AND 75 ORDER BY id;
FETCH 3 FROM c;
UPDATE k SET v = 'moved on' WHERE id BETWEEN 60 AND 75;
DELETE FROM k WHERE id = 64;
INSERT INTO k VALUES (10060, 'later', 0);
FETCH 3 FROM c;
FETCH BACKWARD 2 FROM c;
FETCH ALL FROM c;
CLOSE c;
DECLARE d SCROLL CURSOR FOR SELECT id FROM k WHERE id BETWEEN 80 AND 90 ORDER BY id;
FETCH LAST FROM d;
FETCH PRIOR FROM d;
FETCH FIRST FROM d;
FETCH ABSOLUTE 4 FROM d;
DECLARE u CURSOR FOR SELECT id, v FROM k WHERE id BETWEEN 100 AND 110 FOR UPDATE;
FETCH u;
FETCH u;
UPDATE k SET v = 'current' WHERE CURRENT OF u;
FETCH u;
DELETE FROM k WHERE CURRENT OF u;
COMMIT;
SELECT id, v FROM k WHERE id BETWEEN 60 AND 75 OR id BETWEEN 100 AND 110 ORDER BY id;

\echo == a hot row
CREATE TABLE hot (id int PRIMARY KEY, n bigint);
INSERT INTO hot VALUES (1, 0), (2, 0);
DO $$ BEGIN FOR i IN 1..500 LOOP UPDATE hot SET n = n + i WHERE id = 1; END LOOP; END $$;
SELECT * FROM hot ORDER BY id;
DO $$ BEGIN FOR i IN 1..50 LOOP DELETE FROM hot WHERE id = 2; INSERT INTO hot VALUES (2, i); END LOOP; END $$;
SELECT * FROM hot ORDER BY id;

\echo == secondary indexes
CREATE TABLE s (id bigint PRIMARY KEY, a int, b text, c date, d numeric, e text);
CREATE INDEX s_a ON s (a);
CREATE UNIQUE INDEX s_b ON s (b);
CREATE INDEX s_cd ON s (c DESC, d);
CREATE INDEX s_part ON s (a) WHERE a > 50;
CREATE INDEX s_expr ON s (lower(e));
CREATE INDEX s_inc ON s (a) INCLUDE (d, e);
INSERT INTO s SELECT g, g % 100, 'b' || g, date '2020-01-01' + g % 30, g * 1.5, 'E' || g % 40 FROM generate_series(1, 1000) g;
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT id FROM s WHERE a = 7 ORDER BY id;
SELECT count(*) FROM s WHERE a BETWEEN 10 AND 20;
SELECT a, count(*) FROM s WHERE a > 95 GROUP BY a ORDER BY a;
SELECT id, b FROM s WHERE b = 'b77';
SELECT b FROM s WHERE b >= 'b99' ORDER BY b;
SELECT id, c, d FROM s WHERE c = '2020-01-05' ORDER BY d LIMIT 5;
SELECT c, d FROM s WHERE c = '2020-01-05' ORDER BY c DESC, d DESC LIMIT 5;
SELECT count(*) FROM s WHERE lower(e) = 'e12';
SELECT id FROM s WHERE a = 60 AND a > 50 ORDER BY id;
SELECT d, e FROM s WHERE a = 33 ORDER BY d;
INSERT INTO s VALUES (2000, 1, 'b77', NULL, NULL, NULL);
INSERT INTO s VALUES (2000, NULL, NULL, NULL, NULL, NULL), (2001, NULL, NULL, NULL, NULL, NULL);
SELECT id FROM s WHERE b IS NULL ORDER BY id;
SELECT id FROM s WHERE a IS NULL ORDER BY id;
SELECT count(*) FROM s WHERE a IS NOT NULL;
UPDATE s SET a = 99 WHERE a = 7;
SELECT count(*) FROM s WHERE a = 7;
SELECT count(*) FROM s WHERE a = 99;
UPDATE s SET b = 'x' || b WHERE id < 5 RETURNING id, b;
SELECT id FROM s WHERE b = 'b3';
SELECT id FROM s WHERE b = 'xb3';
UPDATE s SET b = 'b100' WHERE id = 200;
UPDATE s SET id = id + 10000 WHERE a = 99;
SELECT id, a, b FROM s WHERE a = 99 ORDER BY id LIMIT 5;
SELECT id, b FROM s WHERE b = 'b99';
DELETE FROM s WHERE a = 99;
SELECT count(*) FROM s WHERE a = 99;
SELECT count(*) FROM s WHERE b = 'b99';
RESET enable_bitmapscan;
SET enable_indexscan = off;
SELECT count(*), sum(id) FROM s WHERE a < 20;
SELECT count(*), sum(id) FROM s WHERE a < 20 AND lower(e) = 'e12';
SELECT count(*), sum(id) FROM s WHERE a = 5 OR lower(e) = 'e12';
RESET enable_indexscan;
RESET enable_seqscan;
SELECT count(*), sum(id), sum(a) FROM s;
SELECT DISTINCT a FROM s WHERE a < 5 ORDER BY a;
SELECT a, b FROM s WHERE (a, b) > (97, 'b5') ORDER BY a, b LIMIT 3;
CREATE INDEX s_ab ON s (a, b);
SELECT a, b FROM s WHERE (a, b) > (97, 'b5') ORDER BY a, b LIMIT 3;
SELECT a, b FROM s WHERE (a, b) <= (2, 'b5') ORDER BY a DESC, b DESC LIMIT 3;
SELECT count(*) FROM s WHERE a IN (1, 2, 3) AND b > 'b5';
DROP INDEX s_a;
SELECT count(*) FROM s WHERE a = 33;
REINDEX INDEX s_b;
SELECT id FROM s WHERE b = 'b500';
ALTER TABLE s DROP COLUMN e;
SELECT * FROM s WHERE id = 500;
SELECT * FROM s x JOIN s y ON x.b = y.b WHERE x.a = 50 ORDER BY x.id LIMIT 2;

\echo == keys of other types
CREATE TABLE tk (k text PRIMARY KEY, n int);
INSERT INTO tk SELECT 'key' || lpad(g::text, 4, '0'), g FROM generate_series(1, 100) g;
INSERT INTO tk VALUES ('key0005', 0);
INSERT INTO tk VALUES ('', 0), (repeat('x', 500), 1);
SELECT k, n FROM tk WHERE k = 'key0042';
UPDATE tk SET k = 'other' WHERE k = 'key0042' RETURNING *;
SELECT count(*) FROM tk WHERE k = 'key0042';
SELECT n FROM tk WHERE k = 'other';
DELETE FROM tk WHERE k = 'other';
SELECT count(*), sum(n) FROM tk;
CREATE TABLE ck (a int, b text, c date, v int, PRIMARY KEY (a, b, c));
INSERT INTO ck SELECT g % 5, 'b' || g % 7, date '2021-01-01' + g % 11, g FROM generate_series(1, 385) g;
SELECT count(*) FROM ck WHERE a = 3;
SELECT sum(v) FROM ck WHERE a = 3 AND b = 'b2';
SELECT v FROM ck WHERE a = 3 AND b = 'b2' AND c > '2021-01-05' ORDER BY c;
INSERT INTO ck VALUES (3, 'b2', '2021-01-03', 0), (3, 'b2', '2021-01-03', 0);
UPDATE ck SET b = 'z' WHERE a = 4 AND c = '2021-01-01' AND v % 7 = 1 RETURNING *;
CREATE TABLE uk (u uuid PRIMARY KEY, f float8 UNIQUE, n numeric UNIQUE, i interval UNIQUE, y bytea UNIQUE);
INSERT INTO uk SELECT md5(g::text)::uuid, g * 1.25, g * 0.1, make_interval(hours => g), decode(md5(g::text), 'hex')
  FROM generate_series(1, 50) g;
INSERT INTO uk VALUES (md5('100')::uuid, 1.25, 7.77, '1 year', '');
INSERT INTO uk VALUES (md5('100')::uuid, 1000, 0.10, '1 year', '');
INSERT INTO uk VALUES (md5('100')::uuid, 1000, 77, '60 minutes', '');
SELECT f FROM uk WHERE n = 1.00;
SELECT n FROM uk WHERE i = '1 day 2 hours';
SELECT n FROM uk ORDER BY f DESC LIMIT 3;
SELECT n FROM uk ORDER BY i LIMIT 3;

\echo == triggers
CREATE TABLE audit (seq serial, t text, op text, old_row text, new_row text);
CREATE FUNCTION log_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO audit (t, op, old_row, new_row) VALUES (TG_TABLE_NAME, TG_NAME || ' ' || TG_OP,
    CASE WHEN TG_OP <> 'INSERT' THEN OLD::text END, CASE WHEN TG_OP <> 'DELETE' THEN NEW::text END);
  RETURN NULL;
END $$;
CREATE TABLE tr (id int PRIMARY KEY, v text);
CREATE TRIGGER after_row AFTER INSERT OR UPDATE OR DELETE ON tr FOR EACH ROW EXECUTE FUNCTION log_row();
CREATE CONSTRAINT TRIGGER deferred_row AFTER INSERT OR UPDATE OR DELETE ON tr DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION log_row();
INSERT INTO tr VALUES (1, 'a'), (2, 'b');
UPDATE tr SET v = v || v;
UPDATE tr SET id = id + 10 WHERE id = 2;
DELETE FROM tr WHERE id = 1;
BEGIN;
INSERT INTO tr VALUES (3, 'c');
UPDATE tr SET v = 'c1' WHERE id = 3;
UPDATE tr SET v = 'c2' WHERE id = 3;
DELETE FROM tr WHERE id = 3;
INSERT INTO tr VALUES (3, 'c3');
COMMIT;
SELECT t, op, old_row, new_row FROM audit ORDER BY seq;
TRUNCATE audit;
CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.v := NEW.v || '*'; RETURN NEW; END $$;
CREATE TRIGGER before_row BEFORE INSERT OR UPDATE ON tr FOR EACH ROW EXECUTE FUNCTION stamp();
INSERT INTO tr VALUES (4, 'd') RETURNING *;
UPDATE tr SET v = 'e' WHERE id = 4 RETURNING *;
CREATE FUNCTION transitions() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO audit (t, op, old_row, new_row)
    SELECT 'transition', TG_OP, (SELECT string_agg(o::text, ' ' ORDER BY o.id) FROM o), (SELECT string_agg(n::text, ' ' ORDER BY n.id) FROM n);
  RETURN NULL;
END $$;
CREATE TRIGGER stmt AFTER UPDATE ON tr REFERENCING OLD TABLE AS o NEW TABLE AS n FOR EACH STATEMENT EXECUTE FUNCTION transitions();
WITH x AS (UPDATE tr SET v = 'same' RETURNING *) SELECT * FROM x ORDER BY 1;
SELECT t, op, old_row, new_row FROM audit ORDER BY t, op, old_row, new_row;

\echo == foreign keys
CREATE TABLE parent (id int PRIMARY KEY, code text UNIQUE);
CREATE TABLE child (id int PRIMARY KEY, pid int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE, code text REFERENCES parent (code) ON DELETE SET NULL);
INSERT INTO parent SELECT g, 'c' || g FROM generate_series(1, 20) g;
INSERT INTO child SELECT g, g % 20 + 1, 'c' || g % 20 + 1 FROM generate_series(1, 60) g;
INSERT INTO child VALUES (100, 999, NULL);
INSERT INTO child VALUES (100, NULL, 'nope');
UPDATE parent SET id = 500 WHERE id = 5;
SELECT * FROM child WHERE pid = 500 ORDER BY id;
DELETE FROM parent WHERE id = 6;
SELECT count(*) FROM child;
DELETE FROM parent WHERE code = 'c7';
SELECT * FROM child WHERE code IS NULL ORDER BY id;
CREATE TABLE tree (id int PRIMARY KEY, up int REFERENCES tree DEFERRABLE INITIALLY DEFERRED);
BEGIN;
INSERT INTO tree VALUES (1, 2);
INSERT INTO tree VALUES (2, 1);
COMMIT;
INSERT INTO tree VALUES (3, 4);
SELECT * FROM tree ORDER BY id;
TRUNCATE parent CASCADE;
SELECT count(*) FROM child;

\echo == on conflict
CREATE TABLE oc (id int PRIMARY KEY, u text UNIQUE, n int DEFAULT 0);
INSERT INTO oc VALUES (1, 'a'), (2, 'b');
INSERT INTO oc VALUES (1, 'z') ON CONFLICT DO NOTHING;
INSERT INTO oc VALUES (1, 'z') ON CONFLICT (id) DO UPDATE SET n = oc.n + 1, u = EXCLUDED.u RETURNING *;
INSERT INTO oc VALUES (3, 'b') ON CONFLICT (u) DO UPDATE SET n = oc.n + 10 RETURNING *;
INSERT INTO oc VALUES (3, 'b') ON CONFLICT (id) DO NOTHING;
INSERT INTO oc VALUES (4, 'd'), (4, 'e') ON CONFLICT (id) DO UPDATE SET u = EXCLUDED.u;
INSERT INTO oc SELECT g, 'g' || g FROM generate_series(1, 10) g ON CONFLICT (id) DO UPDATE SET n = -1 WHERE oc.id < 2;
INSERT INTO oc VALUES (2, 'q') ON CONFLICT ON CONSTRAINT oc_pkey DO UPDATE SET id = 200 RETURNING *;
SELECT * FROM oc ORDER BY id;

\echo == deferrable unique
CREATE TABLE du (id int UNIQUE DEFERRABLE INITIALLY DEFERRED, v text);
INSERT INTO du SELECT g, 'd' || g FROM generate_series(1, 10) g;
UPDATE du SET id = id + 1;
SELECT * FROM du ORDER BY id;
BEGIN;
INSERT INTO du VALUES (5, 'dup');
SELECT count(*) FROM du WHERE id = 5;
DELETE FROM du WHERE id = 5 AND v <> 'dup';
COMMIT;
BEGIN;
INSERT INTO du VALUES (6, 'dup');
COMMIT;
SELECT * FROM du ORDER BY id;

\echo == row locks
BEGIN;
SELECT * FROM hot WHERE id = 1 FOR UPDATE;
SELECT * FROM hot WHERE id = 1 FOR SHARE;
UPDATE hot SET n = 0 WHERE id = 1 RETURNING *;
SELECT * FROM hot ORDER BY id FOR NO KEY UPDATE SKIP LOCKED;
SELECT * FROM hot ORDER BY id FOR KEY SHARE NOWAIT;
COMMIT;
SELECT * FROM hot ORDER BY id;
BEGIN;
SAVEPOINT l;
SELECT * FROM hot WHERE id = 2 FOR UPDATE;
ROLLBACK TO l;
DELETE FROM hot WHERE id = 2;
COMMIT;
SELECT * FROM hot ORDER BY id;

\echo == keys added and dropped
CREATE TABLE ad (id int, v text);
INSERT INTO ad SELECT g, 'v' || g FROM generate_series(1, 100) g;
CREATE INDEX ad_v ON ad (v);
ALTER TABLE ad ADD PRIMARY KEY (id);
INSERT INTO ad VALUES (50, 'dup');
SELECT * FROM ad WHERE id = 50;
SELECT * FROM ad WHERE v = 'v51';
UPDATE ad SET v = 'new' WHERE id = 50;
SELECT * FROM ad WHERE v = 'new';
ALTER TABLE ad DROP CONSTRAINT ad_pkey;
INSERT INTO ad VALUES (50, 'dup');
SELECT * FROM ad WHERE id = 50 ORDER BY v;
ALTER TABLE ad ADD PRIMARY KEY (id);
DELETE FROM ad WHERE v = 'dup';
BEGIN;
ALTER TABLE ad ADD PRIMARY KEY (id);
INSERT INTO ad VALUES (1000, 'in');
ROLLBACK;
SELECT count(*), sum(id) FROM ad;
CREATE TABLE dk (id int PRIMARY KEY, v text, w int);
CREATE INDEX dk_w ON dk (w);
INSERT INTO dk SELECT g, 'v' || g, g % 5 FROM generate_series(1, 100) g;
BEGIN;
ALTER TABLE dk DROP CONSTRAINT dk_pkey;
INSERT INTO dk VALUES (1, 'twice', 1);
SELECT count(*) FROM dk WHERE id = 1;
ROLLBACK;
SELECT count(*) FROM dk WHERE id = 1;
ALTER TABLE dk DROP CONSTRAINT dk_pkey;
INSERT INTO dk VALUES (1, 'twice', 1);
SELECT * FROM dk WHERE id = 1 ORDER BY v;
SELECT count(*) FROM dk WHERE w = 1;
ALTER TABLE dk ADD COLUMN x int PRIMARY KEY GENERATED ALWAYS AS IDENTITY;
SELECT count(*), min(x), max(x) FROM dk;
ALTER TABLE dk ALTER COLUMN id TYPE text USING id::text;
SELECT * FROM dk WHERE id = '7' ORDER BY x;
VACUUM dk;
VACUUM FULL dk;
SELECT count(*), min(x), max(x) FROM dk;
SELECT v FROM dk WHERE x = 7;
ANALYZE dk;

\echo == create, truncate, drop and their rollback
BEGIN;
CREATE TABLE gone (id int PRIMARY KEY);
INSERT INTO gone SELECT generate_series(1, 10);
SELECT count(*) FROM gone;
ROLLBACK;
SELECT count(*) FROM gone;
BEGIN;
TRUNCATE k;
SELECT count(*) FROM k;
INSERT INTO k VALUES (1, 'new', 0);
SELECT * FROM k;
ROLLBACK;
SELECT count(*), sum(id::bigint) FROM k;
BEGIN;
DROP TABLE k;
ROLLBACK;
SELECT count(*) FROM k;
TRUNCATE k;
INSERT INTO k VALUES (1, 'new', 0);
SELECT * FROM k;
CREATE TABLE ctas AS SELECT g AS a, 'x' || g AS b FROM generate_series(1, 50) g;
SELECT count(*), sum(a) FROM ctas;
CREATE MATERIALIZED VIEW mv AS SELECT a % 5 AS r, count(*) AS n FROM ctas GROUP BY 1;
CREATE UNIQUE INDEX ON mv (r);
SELECT * FROM mv ORDER BY r;
DELETE FROM ctas WHERE a < 10;
REFRESH MATERIALIZED VIEW mv;
SELECT * FROM mv ORDER BY r;
DELETE FROM ctas WHERE a < 20;
REFRESH MATERIALIZED VIEW CONCURRENTLY mv;
SELECT * FROM mv ORDER BY r;

\echo == partitions
CREATE TABLE pt (id int, r text, v int, PRIMARY KEY (id, r)) PARTITION BY LIST (r);
CREATE TABLE pt_a PARTITION OF pt FOR VALUES IN ('a');
CREATE TABLE pt_b PARTITION OF pt FOR VALUES IN ('b');
INSERT INTO pt SELECT g, CASE WHEN g % 2 = 0 THEN 'a' ELSE 'b' END, g FROM generate_series(1, 40) g;
INSERT INTO pt VALUES (1, 'c', 0);
INSERT INTO pt VALUES (2, 'a', 0);
UPDATE pt SET r = 'b' WHERE id = 2 RETURNING *;
SELECT tableoid::regclass, count(*) FROM pt GROUP BY 1 ORDER BY 1;
INSERT INTO pt VALUES (2, 'b', 7) ON CONFLICT (id, r) DO UPDATE SET v = EXCLUDED.v RETURNING *;
SELECT sum(v) FROM pt WHERE r = 'b';
CREATE TABLE pt_c (id int NOT NULL, r text NOT NULL, v int);
INSERT INTO pt_c VALUES (1, 'c', 1);
ALTER TABLE pt ATTACH PARTITION pt_c FOR VALUES IN ('c');
SELECT count(*) FROM pt;
ALTER TABLE pt DETACH PARTITION pt_a;
SELECT count(*) FROM pt;

\echo == large values
CREATE TABLE big (id int PRIMARY KEY, v text, b bytea);
INSERT INTO big SELECT g, repeat(md5(g::text), g * 400), decode(repeat(md5(g::text), 100), 'hex') FROM generate_series(1, 10) g;
SELECT id, length(v), md5(v), length(b) FROM big ORDER BY id;
UPDATE big SET v = v || 'tail' WHERE id = 10;
SELECT length(v), right(v, 4) FROM big WHERE id = 10;
SELECT id FROM big WHERE v LIKE '%tail';

\echo == system columns and sampling
SELECT count(DISTINCT ctid) FROM ctas;
SELECT count(*) FROM ctas WHERE tableoid = 'ctas'::regclass;
SELECT count(*) > 0 FROM ctas WHERE xmin IS NOT NULL;
SELECT count(*) FROM ctas TABLESAMPLE BERNOULLI (100);
SELECT count(*) FROM ctas TABLESAMPLE SYSTEM (100);

\echo == copy
COPY ctas FROM STDIN;
1000	copied one
1001	copied two
\.
COPY (SELECT * FROM ctas WHERE a >= 1000 ORDER BY a) TO STDOUT;
COPY tk FROM STDIN;
key0001	5
\.
SELECT n FROM tk WHERE k = 'key0001';
MERGE INTO oc USING (VALUES (1, 'm1'), (77, 'm77')) m (id, u) ON oc.id = m.id
  WHEN MATCHED THEN UPDATE SET u = m.u WHEN NOT MATCHED THEN INSERT VALUES (m.id, m.u, 5);
SELECT * FROM oc ORDER BY id;
WITH moved AS (DELETE FROM oc WHERE id > 70 RETURNING *), back AS (INSERT INTO oc SELECT id + 1, u, n FROM moved RETURNING *)
  SELECT * FROM back ORDER BY id;

\echo == many updates of one row under deferred triggers
CREATE TABLE mp (k int PRIMARY KEY, id int UNIQUE);
CREATE TABLE mc (id int PRIMARY KEY, pid int REFERENCES mp (id) DEFERRABLE INITIALLY DEFERRED);
INSERT INTO mp VALUES (1, 1);
INSERT INTO mc VALUES (1, 1);
BEGIN;
DO $$ BEGIN FOR i IN 1..15 LOOP UPDATE mp SET id = 100 + i WHERE k = 1; END LOOP; END $$;
COMMIT;
SELECT * FROM mp;
BEGIN;
DO $$ BEGIN FOR i IN 1..14 LOOP UPDATE mp SET id = 100 + i WHERE k = 1; END LOOP; UPDATE mp SET id = 1 WHERE k = 1; END $$;
COMMIT;
SELECT * FROM mp;
