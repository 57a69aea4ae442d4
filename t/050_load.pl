# A transaction that loads ten times nemo.buffer_size in one COPY, committed and rolled back (C6, C8): right rows and
# bounded memory; then what unsettled records left behind is settled by VACUUM (F7).
use strict;
use warnings;
use Test::More;
use NemoNode;

my $node = NemoNode->new(conf => [ "nemo.buffer_size = '4MB'", "fsync = off", "autovacuum = off" ]);
ok($node->start(), 'server starts');
my $rows = 160000;		# of about 270 bytes: 43 MB
$node->sql(qq{
	CREATE EXTENSION nemo;
	CREATE TABLE l (id int PRIMARY KEY, k text, pad text) USING nemo;
	CREATE INDEX l_k ON l (k);
	CREATE TABLE h (LIKE l);
});
my $file = "$node->{dir}/load.tsv";
open my $f, '>', $file or die;
print $f "$_\tk" . ($_ * 7919 % 100003) . "\t" . ("p" x 230) . "\n" for 1 .. $rows;
close $f;
$node->sql("COPY h FROM '$file'");

$node->sql("BEGIN; COPY l FROM '$file'; ROLLBACK");
is($node->sql("SELECT count(*) FROM l"), '0', 'C8: nothing is left of the load rolled back');
is($node->sql("SET enable_seqscan = off; SELECT count(*) FROM l WHERE k > ''"), '0', 'C8: nor in its index');

$node->sql("BEGIN; COPY l FROM '$file'; COMMIT");
my $digest = "SELECT count(*), sum(id), sum(hashtext(k)::bigint), sum(length(pad)) FROM";
is($node->sql("$digest l"), $node->sql("$digest h"), 'C8: the load committed equals heap');
is($node->sql("SET enable_seqscan = off; SELECT count(*) FROM l WHERE k LIKE 'k%' AND k >= 'k'"), $rows, 'so does its index');
my ($size, $used) = split /\|/, $node->sql("SELECT size_bytes, used_bytes FROM nemo_stat_buffer");
cmp_ok($used, '<=', $size, "C6: memory is bounded ($used of $size bytes)");

my $frozen = "SELECT age(relfrozenxid) FROM pg_class WHERE relname = 'l'";
$node->sql("VACUUM (FREEZE) l");
cmp_ok($node->sql($frozen), '<', 5, 'F7: VACUUM settles and relfrozenxid advances');
is($node->sql("$digest l"), $node->sql("$digest h"), 'F7: and the rows are the same');
$node->kill9();
ok($node->start(), 'restart after a crash');
is($node->sql("$digest l"), $node->sql("$digest h"), 'E4: and the rows are the same');
ok($node->stop(), 'server stops');
done_testing();
