# Bad input: each is a clear error with SQLSTATE, and nothing is lost.
use strict;
use warnings;
use Test::More;
use NemoNode;

my $node = NemoNode->new(conf => [ "nemo.buffer_size = '16MB'", "max_prepared_transactions = 2", "fsync = off" ]);
ok($node->start(), 'server starts');
$node->sql(q{
	CREATE EXTENSION nemo;
	CREATE TABLE t (id int PRIMARY KEY, v text, p point, a int[]) USING nemo;
	INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 1000) g;
});

# statement fails with this SQLSTATE and a message that matches
sub fails
{
	my ($sql, $state, $like, $name) = @_;
	my ($status, $out, $err) = $node->psql("\\set VERBOSITY verbose\n$sql");
	isnt($status, 0, "$name: fails");
	like($err, qr/\Q$state\E: /, "$name: SQLSTATE $state");
	like($err, $like, "$name: says why");
}

fails("CREATE INDEX ON t USING gin (a)", '0A000', qr/gin.*\n.*(DETAIL|HINT)/s, 'GIN');
fails("CREATE INDEX ON t USING gist (p)", '0A000', qr/gist/, 'GiST');
fails("CREATE INDEX ON t USING brin (id)", '0A000', qr/brin/, 'BRIN');
fails("CREATE INDEX ON t USING hash (id)", '0A000', qr/hash/, 'hash');
fails("CREATE INDEX ON t (a)", '0A000', qr/integer\[\].*HINT/s, 'unsupported key type');
fails("CREATE UNLOGGED TABLE u (a int) USING nemo", '0A000', qr/HINT/, 'unlogged');
fails("CREATE TEMP TABLE u (a int) USING nemo", '0A000', qr/HINT/, 'temporary');
fails("CREATE TABLE l (k text PRIMARY KEY) USING nemo; INSERT INTO l VALUES (repeat('k', 3000))", '54000', qr/l_pkey/, 'key too long');
fails("INSERT INTO t VALUES (5000, (SELECT string_agg(md5(g::text), '') FROM generate_series(1, 700000) g))", '54000', qr/row|record/i, 'row too long');
fails("BEGIN; INSERT INTO t VALUES (5001, 'x'); PREPARE TRANSACTION 'p'", '0A000', qr/PREPARE|two-phase|prepare/i, 'D10: two-phase commit');
$node->sql("CREATE TABLE mp (k int PRIMARY KEY, id int UNIQUE) USING nemo; INSERT INTO mp VALUES (1, 1);
	CREATE TABLE mc (id int PRIMARY KEY, pid int REFERENCES mp (id) DEFERRABLE INITIALLY DEFERRED) USING nemo; INSERT INTO mc VALUES (1, 1)");
fails("BEGIN; DO \$\$ BEGIN FOR i IN 1..$_ LOOP UPDATE mp SET id = 100 + i WHERE k = 1; END LOOP; END \$\$; COMMIT", '0A000',
	qr/deferred triggers/, "F1: $_ updates under deferred triggers") for 16, 17, 40;
is($node->sql("SELECT * FROM mp"), '1|1', 'F1: and nothing has changed');
fails("SELECT nemo_evict('pg_class')", '42809', qr/nemo table/, 'evicting a heap table');
is($node->sql("SELECT count(*), sum(id) FROM t"), '1000|500500', 'nothing is lost');
ok($node->stop(), 'server stops');

# the store is not where it was
rename "$node->{data}/nemo/store", "$node->{data}/nemo/away" or die $!;
$node->start();
fails("SELECT count(*) FROM t", '58030', qr/store/, 'store directory missing');
is($node->sql("SELECT 1"), '1', 'heap goes on without the store');
$node->stop();
rename "$node->{data}/nemo/away", "$node->{data}/nemo/store" or die $!;
ok($node->start(), 'E7: it is put back');
is($node->sql("SELECT count(*), sum(id) FROM t"), '1000|500500', 'nothing is lost');

# another cluster's store
my $other = NemoNode->new(conf => [ "nemo.store = 'lmdb:$node->{data}/nemo/store'", "fsync = off" ]);
$node->stop();
$other->start();
my ($status, $out, $err) = $other->psql("\\set VERBOSITY verbose\nCREATE EXTENSION nemo; CREATE TABLE o (a int) USING nemo");
isnt($status, 0, 'E7: a store owned by another cluster is refused');
like($err, qr/own/i, 'E7: and the error says so');
$other->stop('immediate');
ok($node->start(), 'E7: the owner still starts');
is($node->sql("SELECT count(*), sum(id) FROM t"), '1000|500500', 'E7: nothing is lost');

# corrupted store bytes
$node->stop();
open my $f, '+<', "$node->{data}/nemo/store/data.mdb" or die $!;
binmode $f;
my $size = -s $f;
seek $f, 0, 0;
print $f "\xA5" x $size;
close $f;
$node->start();
fails("SELECT count(*) FROM t", 'XX001', qr/corrupt|did not write/i, 'corrupted store');
$node->stop('immediate');

# not preloaded
my $bare = NemoNode->new(preload => 0, conf => ["fsync = off"]);
$bare->start();
($status, $out, $err) = $bare->psql("\\set VERBOSITY verbose\nCREATE EXTENSION nemo; CREATE TABLE o (a int) USING nemo");
isnt($status, 0, 'not preloaded: fails');
like($err, qr/55000: .*HINT:.*shared_preload_libraries/s, 'not preloaded: says what to do');
$bare->stop('immediate');

# no replication slot to be had
my $slotless = NemoNode->new(conf => [ "max_replication_slots = 0", "fsync = off" ]);
ok($slotless->start(), 'no replication slot: the server starts');
($status, $out, $err) = $slotless->psql("\\set VERBOSITY verbose\nCREATE EXTENSION nemo; CREATE TABLE o (a int) USING nemo");
isnt($status, 0, 'no replication slot: fails');
like($err, qr/ERROR:  \w{5}: .*max_replication_slots/s, 'no replication slot: says what to do');
is($slotless->sql("SELECT 1"), '1', 'no replication slot: heap goes on');
$slotless->stop('immediate');

# minimal WAL
my $minimal = NemoNode->new(conf => [ "wal_level = minimal", "max_wal_senders = 0", "fsync = off" ]);
if ($minimal->start())
{
	($status, $out, $err) = $minimal->psql("\\set VERBOSITY verbose\nCREATE EXTENSION nemo; CREATE TABLE o (a int) USING nemo");
	isnt($status, 0, 'wal_level = minimal: fails');
	like($err, qr/wal_level/, 'wal_level = minimal: says what to do');
}
else { like($minimal->log_content(), qr/wal_level/, 'wal_level = minimal: the log says what to do'); }
$minimal->stop('immediate');
done_testing();
