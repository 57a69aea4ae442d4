# What concurrent transactions see and do to each other (F2, F3, F4, F8, F9, F10, D5, D6): each spec runs on heap and on nemo, and the
# answers, the waits and the errors must be the same.
use strict;
use warnings;
use Test::More;
use NemoNode;

my $pgxs = `pg_config --pgxs`;
my ($tester) = $pgxs =~ m{^(.*)/src/makefiles/pgxs\.mk$};
$tester .= '/src/test/isolation/isolationtester';
my $node = NemoNode->new(conf => [ "nemo.buffer_size = '16MB'", "fsync = off", "autovacuum = off" ]);
ok($node->start(), 'server starts');
for my $am ('heap', 'nemo')
{
	$node->sql("CREATE DATABASE $am");
	$node->psql("\\c $am\nCREATE EXTENSION nemo; ALTER DATABASE $am SET default_table_access_method = $am");
}
for my $spec (sort glob 'specs/*.spec')
{
	my %out;
	for my $am ('heap', 'nemo')
	{
		$out{$am} = `$tester 'host=$node->{dir} port=$node->{port} user=postgres dbname=$am' < $spec 2>&1`;
	}
	cmp_ok(length $out{heap}, '>', 1000, "$spec says something on heap");
	is($out{nemo}, $out{heap}, "$spec: nemo answers as heap does");
}
my (undef, $am) = $node->psql("\\c nemo\nSHOW default_table_access_method");
like($am, qr/nemo$/, 'the tables of one run were nemo tables');
ok($node->stop(), 'server stops');
done_testing();
