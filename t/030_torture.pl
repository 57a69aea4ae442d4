# Crash torture (C1 to C9, E1 to E6): clients transfer money, look rows up by index, delete and re-insert them, with a
# buffer smaller than the data; the whole server is killed with SIGKILL at random moments, also during replay.  After
# each restart every acknowledged commit is there and nothing unacknowledged is half there.
use strict;
use warnings;
use Test::More;
use Time::HiRes qw(sleep time);
use NemoNode;

my $rounds = $ENV{NEMO_TORTURE_ROUNDS} // ($ENV{NEMO_STRESS} ? 200 : 20);
my $seed = $ENV{NEMO_SEED} // time() ^ $$;
srand($seed);
note "seed $seed, $rounds rounds";
my $accounts = 20000;
my $clients = 4;

my $node = NemoNode->new(conf => [ "nemo.buffer_size = '2MB'", "nemo.checkpoint_interval = 1", "max_wal_size = '64MB'" ]);
ok($node->start(), 'server starts');
$node->sql(qq{
	CREATE EXTENSION nemo;
	CREATE TABLE account (id int PRIMARY KEY, owner text NOT NULL, balance bigint NOT NULL, pad text) USING nemo;
	CREATE INDEX account_owner ON account (owner);
	CREATE TABLE journal (client int, seq bigint, src int, dst int, amount int, PRIMARY KEY (client, seq)) USING nemo;
	INSERT INTO account SELECT g, 'o' || g % 500, 1000, repeat('x', 150) FROM generate_series(1, $accounts) g;
});
my $total = $accounts * 1000;

# A client: transactions until the connection dies; appends "A seq" to its file for each acknowledged commit.
sub client
{
	my ($n, $base) = @_;
	my $file = "$node->{dir}/client.$n";
	open my $psql, '|-', $node->psql_command() . " -v ON_ERROR_STOP=0 >>$file 2>/dev/null" or exit 1;
	select((select($psql), $| = 1)[0]);
	local $SIG{PIPE} = sub { exit 0 };
	my $seq = $base;
	while (1)
	{
		my ($a, $b) = (1 + int(rand($accounts)), 1 + int(rand($accounts)));
		next if $a == $b;
		my $m = 1 + int(rand(100));
		$seq++;
		print $psql "BEGIN;\n";
		# a row that another client is about to delete and insert again is not found: then the transaction fails
		print $psql "WITH u AS (UPDATE account SET balance = balance - $m WHERE id = $a RETURNING 1) SELECT 1 / count(*) FROM u \\g /dev/null\n";
		if (rand() < 0.2)
		{
			# the other side is deleted and comes back with what it had
			print $psql "WITH d AS (DELETE FROM account WHERE id = $b RETURNING *) SELECT set_config('t.b', balance::text, true), set_config('t.o', owner, true) FROM d \\g /dev/null\n";
			print $psql "INSERT INTO account VALUES ($b, current_setting('t.o'), current_setting('t.b')::bigint + $m, repeat('y', 150));\n";
		}
		else
		{
			print $psql "WITH u AS (UPDATE account SET balance = balance + $m, owner = 'o' || (random() * 500)::int WHERE id = $b RETURNING 1) SELECT 1 / count(*) FROM u \\g /dev/null\n";
		}
		print $psql "SELECT count(*) FROM account WHERE owner = 'o" . int(rand(500)) . "' \\g /dev/null\n" if rand() < 0.2;
		print $psql "INSERT INTO journal VALUES ($n, $seq, $a, $b, $m);\n";
		if (rand() < 0.1) { print $psql "ROLLBACK;\n"; next; }
		print $psql "COMMIT;\n";
		# the echo runs only after the server has answered; it counts when the commit was acknowledged
		print $psql "SELECT $seq AS s WHERE EXISTS (SELECT 1 FROM journal WHERE client = $n AND seq = $seq);\n";
		sleep(0.001);
	}
}

my $bad = 0;
my $acknowledged = 0;
my $verify = $node->sql("SELECT count(*) FROM pg_proc WHERE proname = 'nemo_verify'");
for my $round (1 .. $rounds)
{
	my @pids;
	unlink glob "$node->{dir}/client.*";
	for my $n (1 .. $clients)
	{
		my $pid = fork();
		if ($pid == 0) { client($n, $round * 1_000_000); exit 0; }
		push @pids, $pid;
	}
	sleep(0.3 + rand(2.5));
	system($node->psql_command() . " -c 'SELECT nemo_checkpoint()' >/dev/null 2>&1 &") if rand() < 0.4;
	sleep(rand(0.2));
	$node->kill9();
	kill 'TERM', @pids;
	waitpid $_, 0 for @pids;

	# sometimes killed again while it replays
	if (rand() < 0.3 && $node->start())
	{
		sleep(rand(0.3));
		$node->kill9();
	}
	unless ($node->start()) { fail("round $round: server restarts"); diag(substr($node->log_content(), -3000)); $bad++; last; }

	my ($status, $sum, $err) = $node->psql("SELECT count(*) || ' ' || sum(balance) FROM account");
	if ($status != 0 || $sum ne "$accounts $total") { diag "round $round: accounts '$sum', expected '$accounts $total' $err"; $bad++; }
	my $by_index = $node->sql("SET enable_seqscan = off; SELECT count(*) FROM account WHERE owner >= 'o'");
	if ($by_index ne "$accounts") { diag "round $round: $by_index rows by the secondary index"; $bad++; }
	my %have = map { $_ => 1 } split /\n/, $node->sql("SELECT client || ':' || seq FROM journal WHERE seq > $round * 1000000");
	for my $n (1 .. $clients)
	{
		for my $seq (grep { /^\d+$/ } split /\n/, NemoNode::slurp("$node->{dir}/client.$n"))
		{
			$acknowledged++;
			unless ($have{"$n:$seq"}) { diag "round $round: acknowledged transaction $n:$seq is lost"; $bad++; }
		}
	}
	if ($verify && $round % 5 == 0)
	{
		my $rows = $node->sql("SELECT * FROM nemo_verify('account')") . $node->sql("SELECT * FROM nemo_verify('journal')");
		if ($rows ne '') { diag "round $round: nemo_verify: $rows"; $bad++; }
	}
	last if $bad > 10;
}
is($bad, 0, "C1, C2, C3, E1 to E6: $rounds crashes, nothing lost and nothing half there");
cmp_ok($acknowledged, '>', $rounds * 5, "$acknowledged acknowledged transactions were checked");
ok($node->stop(), 'server stops');
done_testing();
