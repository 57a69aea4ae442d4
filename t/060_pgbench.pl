# pgbench, unmodified, on nemo tables: all scripts and query modes without errors; balances equal the history's deltas.
use strict;
use warnings;
use Test::More;
use NemoNode;

my $scale = $ENV{NEMO_STRESS} ? 10 : 2;
my $seconds = $ENV{NEMO_STRESS} ? 60 : 5;
my $node = NemoNode->new(conf => [ "nemo.buffer_size = '256MB'", "fsync = off", "nemo.checkpoint_interval = 5" ]);
ok($node->start(), 'server starts');
$node->sql("CREATE EXTENSION nemo");
$ENV{NEMO_PGOPTIONS} = '-c default_table_access_method=nemo';
my ($status, $out) = $node->pgbench("-q -i -s $scale");
is($status, 0, 'pgbench -i') or diag $out;
is($node->sql("SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am a ON a.oid = c.relam
	WHERE indrelid::regclass::text LIKE 'pgbench%' AND amname <> 'nemo_index'"), '0', 'its indexes are nemo_index');
for my $mode ('simple', 'extended', 'prepared')
{
	for my $script ('', '-S', '-N')
	{
		($status, $out) = $node->pgbench("-n -c 4 -T $seconds -M $mode $script");
		is($status, 0, "pgbench $script -M $mode") or diag $out;
		unlike($out, qr/error|aborted/i, 'no errors') if $out !~ /failed transactions: 0 /;
	}
}
is($node->sql("SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history)"), 't',
	'account balances equal the deltas');
my $tpcb = "SELECT (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT sum(bbalance) FROM pgbench_branches)";
is($node->sql($tpcb), 't', 'tellers and branches agree');
$node->kill9();
ok($node->start(), 'restart after a crash');
is($node->sql($tpcb), 't', 'they still do');
ok($node->stop(), 'server stops');
done_testing();
