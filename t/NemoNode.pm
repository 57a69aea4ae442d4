# NemoNode.pm: a throw-away PostgreSQL cluster for the tests in t/.
# Runs as the user it is called by (never root); the socket and the data lie in one temporary directory.
package NemoNode;

use strict;
use warnings;
use File::Temp ();
use POSIX ();
use Time::HiRes ();

my $bin = "/usr/lib/postgresql/" . ($ENV{PG_MAJOR} // 15) . "/bin";
my $next_port = 55000 + $$ % 5000;
my @nodes;
my $owner = $$;		# forked children must not tear the nodes down

sub new
{
	my ($class, %opt) = @_;
	my $dir = File::Temp::tempdir("nemo-t.XXXXXX", DIR => $ENV{NEMO_TMP} // "/tmp", CLEANUP => 1);
	my $self = bless { dir => $dir, data => "$dir/data", port => $next_port++ }, $class;

	system("$bin/initdb -D $self->{data} -U postgres -A trust -N --locale=C -E UTF8 >$dir/initdb.log 2>&1") == 0
	  or die "initdb failed, see $dir/initdb.log";
	$self->append_conf("listen_addresses = ''", "unix_socket_directories = '$dir'", "port = $self->{port}",
		"log_line_prefix = '%m [%p] '", "restart_after_crash = off",
		($opt{preload} // 1) ? "shared_preload_libraries = 'nemo'" : "", @{ $opt{conf} // [] });
	push @nodes, $self;
	return $self;
}

sub append_conf
{
	my ($self, @lines) = @_;
	open my $f, '>>', "$self->{data}/postgresql.conf" or die $!;
	print $f "$_\n" for @lines;
	close $f;
}

# Start; returns true when the server accepts connections.
sub start
{
	my ($self) = @_;
	return system("$bin/pg_ctl -D $self->{data} -l $self->{dir}/log -w -t 120 start >/dev/null 2>&1") == 0;
}

sub stop
{
	my ($self, $mode) = @_;
	$mode //= 'fast';
	return system("$bin/pg_ctl -D $self->{data} -m $mode -w -t 180 stop >/dev/null 2>&1") == 0;
}

sub postmaster_pid
{
	my ($self) = @_;
	open my $f, '<', "$self->{data}/postmaster.pid" or return undef;
	my $pid = <$f>;
	chomp $pid;
	return $pid;
}

# SIGKILL to every process of the server, then wait until all are gone.
sub kill9
{
	my ($self) = @_;
	my $pid = $self->postmaster_pid() or return;
	kill 'STOP', $pid;
	my @children = split ' ', `pgrep -P $pid`;
	kill 'KILL', $pid, @children;
	for (1 .. 600)
	{
		last unless grep { kill 0, $_ } $pid, @children;
		Time::HiRes::sleep(0.05);
	}
	unlink "$self->{data}/postmaster.pid";
}

sub psql_command
{
	my ($self, $db) = @_;
	return "$bin/psql -X -q -A -t -h $self->{dir} -p $self->{port} -U postgres -d " . ($db // 'postgres');
}

# Run SQL; returns (exit status, standard output, standard error).
sub psql
{
	my ($self, $sql, $db) = @_;
	my $in = "$self->{dir}/in.$$.sql";
	open my $f, '>', $in or die $!;
	print $f $sql;
	close $f;
	my $out = `@{[ $self->psql_command($db) ]} -v ON_ERROR_STOP=1 -f $in 2>$in.err`;
	my $status = $? >> 8;
	my $err = slurp("$in.err");
	chomp $out;
	return ($status, $out, $err);
}

# Run SQL that must succeed; returns its output.
sub sql
{
	my ($self, $sql, $db) = @_;
	my ($status, $out, $err) = $self->psql($sql, $db);
	die "psql failed: $err\nin: $sql" if $status != 0;
	return $out;
}

sub log_content
{
	my ($self) = @_;
	return slurp("$self->{dir}/log");
}

sub pgbench
{
	my ($self, $args) = @_;
	my $out = `PGOPTIONS="$ENV{NEMO_PGOPTIONS}" $bin/pgbench -h $self->{dir} -p $self->{port} -U postgres $args postgres 2>&1`;
	return ($? >> 8, $out);
}

sub slurp
{
	my ($file) = @_;
	local $/;
	open my $f, '<', $file or return '';
	my $text = <$f>;
	return $text // '';
}

END
{
	my $status = $?;
	if ($$ == $owner) { $_->kill9() for @nodes; }
	$? = $status;
}

$ENV{NEMO_PGOPTIONS} //= '';
1;
