# Twins: concurrent transactions make the same changes to a heap table and a nemo table, and read both under one snapshot,
# while the buffer holds a fraction of the rows (A1 to A10, B1 to B3, C1, C3, C8, F1 to F4).  No answer may differ.
use strict;
use warnings;
use Test::More;
use NemoNode;

my $seconds = $ENV{NEMO_STRESS} ? 600 : 20;
my $node = NemoNode->new(conf => [ "nemo.buffer_size = '3MB'", "nemo.checkpoint_interval = 3", "synchronous_commit = off" ]);
ok($node->start(), 'server starts');
$node->sql("CREATE EXTENSION nemo");
$node->sql(<<'SQL');
CREATE TABLE h (id int PRIMARY KEY, k text, u uuid UNIQUE, n int, pad text) USING heap;
CREATE TABLE n (id int PRIMARY KEY, k text, u uuid UNIQUE, n int, pad text) USING nemo;
CREATE TABLE hs (k text PRIMARY KEY, c bigint) USING heap;
CREATE TABLE ns (k text PRIMARY KEY, c bigint) USING nemo;
CREATE INDEX ON h(k); CREATE INDEX ON n(k); CREATE INDEX ON h(n) WHERE n%3=0; CREATE INDEX ON n(n) WHERE n%3=0;
INSERT INTO h SELECT g, 'k'||g%997, md5(g::text)::uuid, g, repeat('p',g%300) FROM generate_series(1,30000) g;
INSERT INTO n SELECT * FROM h; INSERT INTO hs SELECT 'k'||g, 0 FROM generate_series(0,996) g; INSERT INTO ns SELECT * FROM hs;
CREATE TABLE diffs (what text, a text, b text);
CREATE FUNCTION chk(what text, a text, b text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN IF a IS DISTINCT FROM b THEN RAISE WARNING 'DIFF % heap % nemo %', what, a, b; INSERT INTO diffs VALUES (what, a, b); END IF; END $$;
CREATE FUNCTION work(a int, b int, op int, r int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE x text; y text; BEGIN
 PERFORM pg_advisory_xact_lock(1, a % 64);
 IF op < 30 THEN
  UPDATE h SET n = n + 1, pad = repeat('q', r % 400) WHERE id = a;
  GET DIAGNOSTICS x = ROW_COUNT;
  UPDATE n SET n = n + 1, pad = repeat('q', r % 400) WHERE id = a;
  GET DIAGNOSTICS y = ROW_COUNT;
  PERFORM chk('upd', x, y);
 ELSIF op < 40 THEN
  UPDATE h SET k = 'k'||r%997 WHERE id = a;
  UPDATE n SET k = 'k'||r%997 WHERE id = a;
 ELSIF op < 50 THEN
  DELETE FROM h WHERE id = a;
  GET DIAGNOSTICS x = ROW_COUNT;
  DELETE FROM n WHERE id = a;
  GET DIAGNOSTICS y = ROW_COUNT;
  PERFORM chk('del', x, y);
 ELSIF op < 65 THEN
  INSERT INTO h VALUES (a, 'k'||r%997, md5(a::text||r)::uuid, r, repeat('i', r%500)) ON CONFLICT (id) DO UPDATE SET n = h.n + 5;
  INSERT INTO n VALUES (a, 'k'||r%997, md5(a::text||r)::uuid, r, repeat('i', r%500)) ON CONFLICT (id) DO UPDATE SET n = n.n + 5;
 ELSIF op < 70 THEN
  BEGIN UPDATE h SET id = id + 64 * (1 + r % 500) WHERE id = a; x := 'ok'; EXCEPTION WHEN unique_violation THEN x := 'dup'; END;
  BEGIN UPDATE n SET id = id + 64 * (1 + r % 500) WHERE id = a; y := 'ok'; EXCEPTION WHEN unique_violation THEN y := 'dup'; END;
  PERFORM chk('move', x, y);
 ELSIF op < 80 THEN
  INSERT INTO hs VALUES ('k'||r%2000, 1) ON CONFLICT (k) DO UPDATE SET c = hs.c + 1;
  INSERT INTO ns VALUES ('k'||r%2000, 1) ON CONFLICT (k) DO UPDATE SET c = ns.c + 1;
 ELSIF op < 90 THEN
  SELECT string_agg(t::text, ',' ORDER BY id) INTO x FROM h t WHERE id IN (a, a+64, a+128, a-64);
  SELECT string_agg(t::text, ',' ORDER BY id) INTO y FROM n t WHERE id IN (a, a+64, a+128, a-64);
  PERFORM chk('in', x, y);
 ELSE
  UPDATE h SET n = -n WHERE id = a;
  UPDATE n SET n = -n WHERE id = a; IF r % 2 = 0 THEN RAISE EXCEPTION 'rollback please' USING ERRCODE = '40001'; END IF;
 END IF; END $$;
SQL

sub script
{
	my ($name, $text) = @_;
	open my $f, '>', "$node->{dir}/$name" or die $!;
	print $f $text;
	close $f;
	return "$node->{dir}/$name";
}

# writers of one key meet by an advisory lock, so that both twins see them in the same order
my $write = script('write.sql', <<'SQL');
\set a random(1, 40000)
\set b random(1, 40000)
\set op random(0, 99)
\set r random(1, 100000)
SELECT work(:a, :b, :op, :r);
SQL
my $read = script('read.sql', <<'SQL');
\set lo random(0, 990)
BEGIN ISOLATION LEVEL REPEATABLE READ;
SET LOCAL enable_seqscan = off;
SELECT chk('snap k', (SELECT md5(string_agg(t::text, ',' ORDER BY id)) FROM h t WHERE k = 'k' || :lo), (SELECT md5(string_agg(t::text, ',' ORDER BY id)) FROM n t WHERE k = 'k' || :lo));
SELECT chk('snap range', (SELECT count(*) || ' ' || coalesce(sum(n),0) FROM h WHERE id BETWEEN :lo * 30 AND :lo * 30 + 500), (SELECT count(*) || ' ' || coalesce(sum(n),0) FROM n WHERE id BETWEEN :lo * 30 AND :lo * 30 + 500));
SELECT chk('snap back', (SELECT string_agg(id::text, ',') FROM (SELECT id FROM h WHERE id < :lo * 30 ORDER BY id DESC LIMIT 50) q), (SELECT string_agg(id::text, ',') FROM (SELECT id FROM n WHERE id < :lo * 30 ORDER BY id DESC LIMIT 50) q));
SELECT chk('snap part', (SELECT count(*) || ' ' || coalesce(sum(id),0) FROM h WHERE n % 3 = 0 AND n BETWEEN :lo AND :lo + 100), (SELECT count(*) || ' ' || coalesce(sum(id),0) FROM n WHERE n % 3 = 0 AND n BETWEEN :lo AND :lo + 100));
COMMIT;
SQL
my ($status, $out) = $node->pgbench("-n -c 4 -T $seconds --max-tries=1 -f $write\@8 -f $read\@1");
is($status, 0, 'pgbench') or diag substr($out, -2000);
my ($done) = $out =~ /transactions actually processed: (\d+)/;
cmp_ok($done // 0, '>', $seconds * 20, "$done transactions were done");
# and with processes that do one thing in their life
($status, $out) = $node->pgbench("-n -C -c 4 -t 400 --max-tries=1 -f $write\@8 -f $read\@1");
is($status, 0, 'pgbench with a connection for each transaction') or diag substr($out, -2000);
is($node->sql("SELECT * FROM diffs LIMIT 5"), '', 'all answers were the same');
is($node->sql("(TABLE h EXCEPT TABLE n) UNION ALL (TABLE n EXCEPT TABLE h) LIMIT 5"), '', 'F1: so are the tables');
is($node->sql("(TABLE hs EXCEPT TABLE ns) UNION ALL (TABLE ns EXCEPT TABLE hs) LIMIT 5"), '', 'with a text key, too');
cmp_ok($node->sql("SELECT evicted FROM nemo_stat_buffer"), '>', 10000, 'records were evicted meanwhile');
is($node->sql("SELECT * FROM nemo_verify('n')") . $node->sql("SELECT * FROM nemo_verify('ns')"), '', 'F2: nemo_verify finds nothing');
$node->kill9();
ok($node->start(), 'restart after a crash');
is($node->sql("(TABLE h EXCEPT TABLE n) UNION ALL (TABLE n EXCEPT TABLE h) LIMIT 5"), '', 'E6: the twins lived through it alike');
ok($node->stop(), 'server stops');
done_testing();
