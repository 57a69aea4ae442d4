# The same SQL on heap and on nemo gives the same answers (F1 to F6 and F10 seen from SQL).
use strict;
use warnings;
use Test::More;
use NemoNode;

my $node = NemoNode->new(conf => [ "nemo.buffer_size = '32MB'", "fsync = off" ]);
ok($node->start(), 'server starts');

my %out;
for my $am ('heap', 'nemo')
{
	$node->sql("CREATE DATABASE d_$am");
	$node->sql("CREATE EXTENSION nemo", "d_$am");
	my $cmd = $node->psql_command("d_$am");
	$out{$am} = `PGOPTIONS='-c default_table_access_method=$am' $cmd -f t/differential.sql 2>&1`;
}
my @h = split /\n/, $out{heap};
my @n = split /\n/, $out{nemo};
cmp_ok(scalar @h, '>', 550, 'the heap run says something');
open my $fh, '>', "$node->{dir}/heap.out" or die; print $fh $out{heap}; close $fh;
open my $fn, '>', "$node->{dir}/nemo.out" or die; print $fn $out{nemo}; close $fn;
my $diff = `diff -u $node->{dir}/heap.out $node->{dir}/nemo.out`;
is($diff, '', 'heap and nemo answer alike');

is( $node->sql(
		"SELECT count(*) FROM pg_class c JOIN pg_am a ON a.oid = c.relam JOIN pg_namespace n ON n.oid = c.relnamespace
		 WHERE n.nspname = 'public' AND c.relkind IN ('r', 'm', 'i') AND a.amname NOT IN ('nemo', 'nemo_index')", 'd_nemo'),
	'0', 'every table and index of the nemo run is a nemo one');
is( $node->sql(
		"SELECT coalesce(sum(pg_relation_filenode(c.oid)::int * 0 + coalesce((pg_stat_file(pg_relation_filepath(c.oid), true)).size, 0)), 0)
		 FROM pg_class c JOIN pg_am a ON a.oid = c.relam WHERE a.amname IN ('nemo', 'nemo_index')", 'd_nemo'),
	'0', 'nothing of theirs lies in files of the data directory');
done_testing();
