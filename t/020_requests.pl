# What a query costs in requests to the store, counted by nemo_stat_store: DESIGN's promise to the user.
use strict;
use warnings;
use Test::More;
use NemoNode;

my $node = NemoNode->new(conf => [ "nemo.buffer_size = '64MB'", "fsync = off", "nemo.checkpoint_interval = 3600",
		"autovacuum = off" ]);
ok($node->start(), 'server starts');
$node->sql(q{
	CREATE EXTENSION nemo;
	CREATE TABLE i (id int PRIMARY KEY, v text) USING nemo;
	CREATE TABLE x (k text PRIMARY KEY, v text) USING nemo;
});

# requests of reading operations made by one statement
sub requests
{
	my ($sql, $op) = @_;
	$op //= "'get','get_range'";
	my $out = $node->sql("SET enable_seqscan = off; SET enable_bitmapscan = off;
		SELECT nemo_stat_reset(); $sql; SELECT 'requests ' || sum(requests) FROM nemo_stat_store WHERE operation IN ($op)");
	my ($n) = $out =~ /requests (\d+)/;
	return $n;
}

is(requests("INSERT INTO i SELECT g * 2, 'v' || g FROM generate_series(1, 20000) g"), 0, 'A7: a load into a new table probes nothing');
is(requests("INSERT INTO x SELECT 'k' || g * 2, 'v' || g FROM generate_series(1, 5000) g"), 0, 'the same with a text key');
$node->sql("ANALYZE i; ANALYZE x; SELECT nemo_checkpoint(); SELECT nemo_evict('i'); SELECT nemo_evict('x')");

is(requests("SELECT * FROM i WHERE id = 4000"), 1, 'one request for a cold integer key');
is(requests("SELECT * FROM i WHERE id = 4000", "'get'"), 0, 'none for a hot one');
is(requests("SELECT * FROM x WHERE k = 'k100'"), 1, 'one request for a cold text key');
is(requests("SELECT * FROM x WHERE k = 'k100'"), 0, 'none for a hot one');
is(requests("SELECT * FROM i WHERE id = 4001"), 1, 'one request to learn that a key is absent');
is(requests("SELECT * FROM i WHERE id = 4001"), 0, 'B3: none for a key just found absent');
cmp_ok(requests("SELECT count(*) FROM i WHERE id BETWEEN 10000 AND 10400"), '>', 0, 'a cold range is fetched');
is(requests("SELECT count(*) FROM i WHERE id BETWEEN 10000 AND 10400"), 0, 'A9: none for a range just scanned');
is(requests("SELECT count(*) FROM i WHERE id BETWEEN 10101 AND 10200"), 0, 'none for a part of it');
is(requests("SELECT * FROM i WHERE id = 10111"), 0, 'none for an absent key inside it');
is(requests("SELECT max(id) FROM i WHERE id < 10301 AND id > 10200"), 0, 'A10: none for a backward scan inside it');
is(requests("SELECT count(*) FROM i WHERE id = ANY (ARRAY(SELECT g * 200 FROM generate_series(1, 100) g))"), 1,
	'one request for 100 cold keys');
is($node->sql("SELECT count(*) FROM i WHERE id = ANY (ARRAY(SELECT g * 200 FROM generate_series(1, 100) g))"), '100',
	'and it finds them');
is(requests("UPDATE i SET v = 'w' WHERE id = 4000"), 0, 'none to update a hot key');
is(requests("INSERT INTO i VALUES (4001, 'now')"), 0, 'none to insert a key known absent');
is(requests("DELETE FROM i WHERE id = 4000; SELECT * FROM i WHERE id = 4000"), 0, 'none for a key just deleted');
is(requests("INSERT INTO i VALUES (4000, 'again')"), 0, 'none to insert it again');

# rows of 100 bytes loaded in key order into a buffer that holds them all, settled by a checkpoint
$node->sql(q{
	CREATE TABLE m (aid int PRIMARY KEY, bid int, abalance int, filler char(84)) USING nemo;
	INSERT INTO m SELECT g, 1, 0, '' FROM generate_series(1, 100000) g;
	SELECT nemo_checkpoint();
});
my $bytes = $node->sql("SELECT overhead_per_entry FROM nemo_stat_buffer");
note "bytes per settled record beyond key and value: $bytes";
cmp_ok($bytes, '<=', 48, 'memory per settled record beyond key and value');
$node->stop();
done_testing();
