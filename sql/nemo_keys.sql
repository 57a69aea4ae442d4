--
-- Key encodings: for every type, the bytes of the keys sort exactly as the values do, and are equal exactly when the
-- values are equal; and a key that can be read back gives the very value.
--
SET client_min_messages = warning;
CREATE SCHEMA nemo_keys;
SET search_path = nemo_keys, public;
SET timezone = 'Europe/Berlin';
SET extra_float_digits = 1;

-- nemo_key() is the extension's; the way back is only for this test
CREATE FUNCTION nemo_key_value(key bytea, of anyelement, descending bool DEFAULT false, nulls_first bool DEFAULT false)
RETURNS anyelement AS '$libdir/nemo', 'nemo_key_value_sql' LANGUAGE C STABLE;

-- values of one type, from a query of one column "v"; nulls are added; returns how many there were and what was wrong
CREATE FUNCTION check_keys(typ text, query text, coll text DEFAULT '')
RETURNS TABLE (type text, "values" bigint, misordered bigint, misread bigint) LANGUAGE plpgsql AS $$
DECLARE
	d text;
	n text;
	bad bigint;
BEGIN
	PERFORM setseed(0.15);
	EXECUTE format('CREATE TEMP TABLE t AS SELECT v::%s AS v FROM (%s) q(v) UNION ALL SELECT NULL FROM generate_series(1, 2)',
				   typ, query);
	type := typ || coalesce(' ' || nullif(coll, ''), '');
	SELECT count(*) FROM t INTO "values";
	misordered := 0;
	misread := 0;
	FOREACH d IN ARRAY ARRAY['asc', 'desc'] LOOP
		FOREACH n IN ARRAY ARRAY['first', 'last'] LOOP
			EXECUTE format($q$
				WITH k AS (SELECT v, nemo_key(v %1$s, %2$L, %3$L) AS k FROM t),
					 o AS (SELECT v, k, lag(v) OVER w AS pv, lag(k) OVER w AS pk
						   FROM k WINDOW w AS (ORDER BY v %1$s %4$s NULLS %5$s))
				SELECT count(*) FROM o
				WHERE pk IS NOT NULL
				  AND NOT CASE WHEN v %1$s IS NOT DISTINCT FROM pv %1$s THEN k = pk ELSE k > pk END
				$q$, coll, d = 'desc', n = 'first', d, n) INTO bad;
			misordered := misordered + bad;
			BEGIN
				EXECUTE format($q$
					SELECT count(*) FROM t
					WHERE nemo_key_value(nemo_key(v %1$s, %2$L, %3$L), NULL::%4$s %1$s, %2$L, %3$L)::text %1$s
						  IS DISTINCT FROM v::text %1$s
					$q$, coll, d = 'desc', n = 'first', typ) INTO bad;
				misread := misread + bad;
			EXCEPTION WHEN feature_not_supported THEN
				misread := NULL;		-- not decodable; the bytes were well-formed
			END;
		END LOOP;
	END LOOP;
	DROP TABLE t;
	RETURN NEXT;
END $$;

-- integers around all powers of two, then random ones of all magnitudes
CREATE VIEW int8s AS
	SELECT s * (2::numeric ^ p)::numeric(40) + d AS v
	FROM generate_series(0, 63) p, (VALUES (1), (-1)) s(s), generate_series(-2, 2) d
	UNION ALL
	SELECT trunc((random() - 0.5)::numeric * 2::numeric ^ (i % 65)) + trunc(random() * 9)::int FROM generate_series(1, 3000) i;

-- strings over a small alphabet, so that prefixes and equals are common
CREATE FUNCTION random_string(alphabet text[], maxlen int) RETURNS text LANGUAGE sql VOLATILE AS $$
	SELECT coalesce(string_agg(alphabet[1 + trunc(random() * array_length(alphabet, 1))::int], ''), '')
	FROM generate_series(1, trunc(random() * (maxlen + 1))::int)
$$;
CREATE FUNCTION random_bytes(maxlen int) RETURNS bytea LANGUAGE sql VOLATILE AS $$
	SELECT decode(random_string(ARRAY['00', '00', '01', 'fe', 'ff', 'ff', '7f', '80'], maxlen), 'hex')
$$;

SELECT * FROM check_keys('bool', 'VALUES (true), (false), (true), (false)');
SELECT * FROM check_keys('"char"', $$
	SELECT chr(i)::text FROM generate_series(1, 127) i UNION ALL VALUES (''), ('\200'), ('\377')$$);
SELECT * FROM check_keys('int2', 'SELECT v FROM int8s WHERE v BETWEEN -32768 AND 32767');
SELECT * FROM check_keys('int4', 'SELECT v FROM int8s WHERE v BETWEEN -2147483648 AND 2147483647');
SELECT * FROM check_keys('int8', 'SELECT v FROM int8s WHERE v BETWEEN -9223372036854775808 AND 9223372036854775807');
SELECT * FROM check_keys('oid', 'SELECT v::int8 FROM int8s WHERE v BETWEEN 0 AND 4294967295');
SELECT * FROM check_keys('xid8', 'SELECT v::text FROM int8s WHERE v BETWEEN 0 AND 18446744073709551615');
SELECT * FROM check_keys('pg_lsn', $$SELECT '0/0'::pg_lsn + v FROM int8s WHERE v BETWEEN 0 AND 18446744073709551615$$);
SELECT * FROM check_keys('money', 'SELECT v / 100 FROM int8s WHERE abs(v) < 9223372036854775000');

SELECT * FROM check_keys('float8', $$
	SELECT (random() - 0.5) * 10::float8 ^ (i % 600 - 300) FROM generate_series(1, 3000) i
	UNION ALL SELECT i / 4.0 FROM generate_series(-20, 20) i
	UNION ALL SELECT unnest('{0,-0,NaN,NaN,Infinity,-Infinity,5e-324,-5e-324,1.7976931348623157e308,-1.7976931348623157e308,
		2.2250738585072014e-308}'::float8[])$$);
SELECT * FROM check_keys('float4', $$
	SELECT ((random() - 0.5) * 10::float8 ^ (i % 70 - 35))::float4 FROM generate_series(1, 3000) i
	UNION ALL SELECT i / 4.0 FROM generate_series(-20, 20) i
	UNION ALL SELECT unnest('{0,-0,NaN,Infinity,-Infinity,1e-45,-1e-45,3.4028235e38,-3.4028235e38}'::float4[])$$);
SELECT * FROM check_keys('numeric', $$
	SELECT v FROM int8s
	UNION ALL SELECT (v / 3)::numeric(60, 12) FROM int8s
	UNION ALL SELECT v * 10::numeric ^ (trunc(random() * 80) - 40)::int FROM int8s
	UNION ALL SELECT s * 10::numeric ^ p FROM generate_series(-60, 60) p, (VALUES (1), (-1), (9.99)) s(s)
	UNION ALL SELECT (s || 'e' || p)::numeric FROM (VALUES (16000), (131000), (-16000), (-2000)) p(p), (VALUES (1), (-1)) s(s)
	UNION ALL SELECT (w || '.' || f)::numeric FROM generate_series(-3, 3) w, unnest('{0,00,1,10,100,1000,10000,00001,
		0001,00010,9999,99990,99999,999900001}'::text[]) f
	UNION ALL SELECT unnest('{NaN,Infinity,-Infinity,0,0.000,-0.0,NaN}'::numeric[])$$);

SELECT * FROM check_keys('date', $$
	SELECT '2000-01-01'::date + v::int FROM int8s WHERE v BETWEEN -2451545 AND 2145031948
	UNION ALL SELECT unnest('{infinity, -infinity, 4713-01-01 BC, 5874897-12-31}'::date[])$$);
SELECT * FROM check_keys('time', $$
	SELECT '00:00'::time + v::bigint * interval '1 microsecond' FROM int8s WHERE v BETWEEN 0 AND 86399999999
	UNION ALL SELECT unnest('{24:00}'::time[])$$);
SELECT * FROM check_keys('timetz', $$
	SELECT ('00:00'::time + trunc(random() * 24) * interval '1 hour' + trunc(random() * 3) * interval '1 microsecond')::text ||
		   (ARRAY['+00','+01','-01','+15:59:59','-15:59:59','+05:30','-12','+14'])[1 + trunc(random() * 8)::int]
	FROM generate_series(1, 3000)
	UNION ALL VALUES ('24:00-15:59:59'), ('24:00+00'), ('00:00+15:59:59')$$);
SELECT * FROM check_keys('timestamp', $$
	SELECT '2000-01-01'::timestamp + v::bigint * interval '1 microsecond' FROM int8s WHERE abs(v) < 2e17
	UNION ALL SELECT unnest('{infinity, -infinity, 4714-11-24 00:00:00 BC, 294276-12-31 23:59:59.999999}'::timestamp[])$$);
SELECT * FROM check_keys('timestamptz', $$
	SELECT '2000-01-01 UTC'::timestamptz + v::bigint * interval '1 microsecond' FROM int8s WHERE abs(v) < 2e17
	UNION ALL SELECT unnest('{infinity, -infinity, 4714-11-24 00:00:00+00 BC, 294276-12-31 23:59:59.999999+00}'::timestamptz[])$$);
SELECT * FROM check_keys('interval', $$
	SELECT make_interval(months => m, days => d) + h * interval '1 hour'
	FROM generate_series(-3, 3) m, generate_series(-90, 90, 15) d, generate_series(-48, 48, 12) h
	UNION ALL SELECT v::bigint * interval '1 microsecond' FROM int8s WHERE abs(v) < 9e18
	UNION ALL SELECT make_interval(months => v::int) FROM int8s WHERE abs(v) < 2147483647
	UNION ALL SELECT make_interval(days => v::int, secs => 0.000001) FROM int8s WHERE abs(v) < 2147483647
	UNION ALL SELECT unnest('{178000000 years, -178000000 years, 1 mon -30 days, 1 day -24:00}'::interval[])$$);

SELECT * FROM check_keys('uuid', $$
	SELECT md5(i::text)::uuid FROM generate_series(1, 2000) i
	UNION ALL SELECT unnest('{00000000-0000-0000-0000-000000000000, ffffffff-ffff-ffff-ffff-ffffffffffff}'::uuid[])$$);
SELECT * FROM check_keys('bytea', 'SELECT random_bytes(6) FROM generate_series(1, 4000)');
SELECT * FROM check_keys('text', $$SELECT random_string(ARRAY['a', 'b', E'\x01', E'\x7f', 'é', '€', ' ', '😀', 'B'], 5)
	FROM generate_series(1, 4000)$$, 'COLLATE "C"');
SELECT * FROM check_keys('varchar(20)', $$SELECT random_string(ARRAY['a', 'b', E'\x01', E'\x7f', 'é', ' '], 5)
	FROM generate_series(1, 3000)$$, 'COLLATE "POSIX"');
SELECT * FROM check_keys('bpchar', $$SELECT random_string(ARRAY['a', ' ', E'\x01', 'é', ' '], 4)
	FROM generate_series(1, 3000)$$, 'COLLATE "C"');
SELECT * FROM check_keys('char(8)', $$SELECT random_string(ARRAY['a', ' ', E'\x01', 'é', ' '], 4)
	FROM generate_series(1, 3000)$$, 'COLLATE "C"');
SELECT * FROM check_keys('name', $$SELECT random_string(ARRAY['a', 'b', E'\x01', 'é', ' '], 5)
	FROM generate_series(1, 3000) UNION ALL VALUES (repeat('x', 63)), (repeat('x', 62)), ('')$$);
SELECT * FROM check_keys('oidvector', $$
	SELECT string_agg((random() * 4294967295)::int8 % (5 + i % 3 * 4000000)::int8 || '', ' ')
	FROM generate_series(1, 2000) i GROUP BY i / 3 UNION ALL SELECT string_agg('1', ' ')
	FROM generate_series(1, 300) i GROUP BY i / 40 UNION ALL VALUES (''), ('0'), ('4294967295')$$);
SELECT * FROM check_keys('tid', $$SELECT format('(%s,%s)', b, o)
	FROM unnest('{0,1,255,256,65535,65536,4294967295}'::int8[]) b, unnest('{0,1,2,255,256,65535}'::int[]) o$$);
SELECT * FROM check_keys('inet', $$
	SELECT set_masklen('0.0.0.0'::inet + trunc(random() * 4294967295)::bigint, trunc(random() * 33)::int)
		FROM generate_series(1, 2000)
	UNION ALL SELECT set_masklen('10.0.0.0'::inet + trunc(random() * 4)::bigint, 24 + trunc(random() * 9)::int)
		FROM generate_series(1, 300)
	UNION ALL SELECT set_masklen('10.0.0.0'::inet + (1 << trunc(random() * 31)::int), trunc(random() * 33)::int)
		FROM generate_series(1, 500)
	UNION ALL SELECT set_masklen('2001:db8::'::inet + trunc(random() * 1000)::bigint, 110 + trunc(random() * 19)::int)
		FROM generate_series(1, 500)
	UNION ALL SELECT set_masklen(('ffff::' || to_hex((random() * 65535)::int))::inet, trunc(random() * 129)::int)
		FROM generate_series(1, 500)
	UNION ALL SELECT unnest('{0.0.0.0/0, 255.255.255.255, ::/0, ::, ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff}'::inet[])$$);
SELECT * FROM check_keys('cidr', $$
	SELECT network(set_masklen('0.0.0.0'::inet + trunc(random() * 4294967295)::bigint, trunc(random() * 33)::int))
	FROM generate_series(1, 2000)
	UNION ALL SELECT network(set_masklen('2001:db8::'::inet + trunc(random() * 1000)::bigint, 110 + trunc(random() * 19)::int))
	FROM generate_series(1, 500)$$);
SELECT * FROM check_keys('macaddr', $$SELECT left(md5(i::text), 12) FROM generate_series(1, 2000) i
	UNION ALL VALUES ('000000000000'), ('ffffffffffff'), ('7fffffffffff'), ('800000000000')$$);
SELECT * FROM check_keys('macaddr8', $$SELECT left(md5(i::text), 16) FROM generate_series(1, 2000) i
	UNION ALL VALUES ('0000000000000000'), ('ffffffffffffffff')$$);
SELECT * FROM check_keys('varbit', $$SELECT random_string(ARRAY['0', '0', '1', '00000000', '11111111', '0000'], 5)
	FROM generate_series(1, 4000)$$);
SELECT * FROM check_keys('bit(11)', $$SELECT (random() * 2047)::int::bit(11) FROM generate_series(1, 2000)$$);

-- enum: by label, also after labels were added in between
CREATE TYPE colour AS ENUM ('red', 'green', 'blue');
CREATE TABLE enum_before AS SELECT v, nemo_key(v) AS k FROM unnest(enum_range(NULL::colour)) v;
ALTER TYPE colour ADD VALUE 'orange' AFTER 'red';
ALTER TYPE colour ADD VALUE 'black' BEFORE 'red';
ALTER TYPE colour ADD VALUE 'amber' BEFORE 'orange';
ALTER TYPE colour ADD VALUE 'violet';
SELECT count(*) AS changed FROM enum_before WHERE k <> nemo_key(v);
SELECT * FROM check_keys('colour', 'SELECT unnest(enum_range(NULL::colour)) UNION ALL SELECT unnest(enum_range(NULL::colour))');

-- domains are their base types
CREATE DOMAIN positive AS int8 CHECK (VALUE > 0);
SELECT nemo_key(5::positive) = nemo_key(5::int2) AS "same as int2", nemo_key(5), nemo_key(-1), nemo_key(300, true);

-- ICU collations: sort key and bytes, or the sort key alone where equal strings may differ.  Needs Unicode.
CREATE FUNCTION check_icu() RETURNS TABLE (type text, "values" bigint, misordered bigint, misread bigint)
LANGUAGE plpgsql AS $$
DECLARE
	alphabet text := $q$SELECT random_string(ARRAY['a', 'A', 'á', 'b', 'B', 'æ', 'z', 'Z', '-', ' ', '_', '1', '10', 'ss',
		'ß', 'ch', 'e', U&'\0301', U&'\0327', 'é', '日', '😀', 'ffi', 'ﬃ', 'I', 'i', 'ı', 'ö', 'o', 'ŀ'], 5)
		FROM generate_series(1, 4000)$q$;
BEGIN
	CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
	CREATE COLLATION accents (provider = icu, locale = 'fr-u-ks-level1-kc-true', deterministic = false);
	CREATE COLLATION natural_order (provider = icu, locale = 'en-u-kn-true');
	CREATE COLLATION upper_first (provider = icu, locale = 'cs-u-kf-upper');
	CREATE COLLATION shifted (provider = icu, locale = 'de-u-ka-shifted', deterministic = false);
	RETURN QUERY SELECT * FROM check_keys('text', alphabet, 'COLLATE "und-x-icu"');
	RETURN QUERY SELECT * FROM check_keys('text', alphabet, 'COLLATE ci');
	RETURN QUERY SELECT * FROM check_keys('text', alphabet, 'COLLATE accents');
	RETURN QUERY SELECT * FROM check_keys('text', alphabet, 'COLLATE natural_order');
	RETURN QUERY SELECT * FROM check_keys('varchar', alphabet, 'COLLATE upper_first');
	RETURN QUERY SELECT * FROM check_keys('bpchar', alphabet, 'COLLATE shifted');
	RETURN QUERY SELECT * FROM check_keys('bpchar', alphabet, 'COLLATE "de-x-icu"');
	RETURN QUERY SELECT * FROM check_keys('name', alphabet, 'COLLATE "sv-x-icu"');
END $$;
SELECT * FROM check_icu();

-- several columns: one after the other, each with its own direction
CREATE TABLE several AS
	SELECT CASE WHEN random() < 0.9 THEN random_string(ARRAY['a', 'b', E'\x01'], 2) END AS a,
		   CASE WHEN random() < 0.9 THEN trunc((random() - 0.5) * 4) / 2 END::numeric AS b,
		   CASE WHEN random() < 0.9 THEN random_bytes(2) END AS c,
		   CASE WHEN random() < 0.9 THEN trunc((random() - 0.5) * 600) END::int AS d
	FROM generate_series(1, 10000), setseed(0.5);
SELECT count(*) AS misordered
FROM (SELECT k, lag(k) OVER w AS pk, rank() OVER w AS r, lag(r0) OVER w AS r0
	  FROM (SELECT *, rank() OVER w0 AS r0,
				   nemo_key(a COLLATE "C") || nemo_key(b, true, true) || nemo_key(c, false, true) || nemo_key(d, true) AS k
			FROM several
			WINDOW w0 AS (ORDER BY a COLLATE "C", b DESC NULLS FIRST, c NULLS FIRST, d DESC NULLS LAST)) q
	  WINDOW w AS (ORDER BY r0)) q
WHERE pk IS NOT NULL AND NOT CASE WHEN r = r0 THEN k = pk ELSE k > pk END;
SELECT count(*) AS misordered
FROM (SELECT k, lag(k) OVER w AS pk, rank() OVER w AS r, lag(r0) OVER w AS r0
	  FROM (SELECT *, rank() OVER w0 AS r0,
				   nemo_key(d, false, true) || nemo_key(a COLLATE "C", true) || nemo_key(c, true, true) || nemo_key(b) AS k
			FROM several
			WINDOW w0 AS (ORDER BY d NULLS FIRST, a COLLATE "C" DESC NULLS LAST, c DESC NULLS FIRST, b)) q
	  WINDOW w AS (ORDER BY r0)) q
WHERE pk IS NOT NULL AND NOT CASE WHEN r = r0 THEN k = pk ELSE k > pk END;

-- no encoding: a clear error
SELECT nemo_key(ARRAY[1, 2]);
SELECT nemo_key(int4range(1, 2));
SELECT nemo_key(ROW(1, 2));
SELECT nemo_key('{}'::jsonb);
SELECT nemo_key('{}'::json);

-- bytes that are no key
SELECT nemo_key_value('\x', 1);
SELECT nemo_key_value('\x8201', 1);
SELECT nemo_key_value('\x820001', 1);			-- not the shortest form
SELECT nemo_key_value('\x8500000001ff', 1);		-- not the shortest form
SELECT nemo_key_value('\x850100000000', 1);		-- too large for the type
SELECT nemo_key_value('\x8061', 'a'::text COLLATE "C");
SELECT nemo_key_value('\x80610062', 'a'::text COLLATE "C");
SELECT nemo_key_value('\x8000020001', '\x'::bytea);

DROP SCHEMA nemo_keys CASCADE;
