#!/usr/bin/env bash
# heap.sh [SECONDS] [SCALE] [ROUNDS]: nemo beside heap + btree in one run on one cluster, everything cached, prepared
# mode.  Each workload runs ROUNDS times for SECONDS on either, by turns; printed are the medians and the median of the
# rounds' ratios nemo/heap of throughput (higher is better for nemo).
# Run with: bench/heap.sh 4 10 7
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
seconds=${1:-4}
scale=${2:-10}
rounds=${3:-7}

need_packages build-essential "postgresql-$PG_MAJOR" "postgresql-server-dev-$PG_MAJOR" liblmdb-dev
build_and_install
dir=$(mktemp -d /tmp/nemo-bench.XXXXXX)
chmod 755 "$dir"
port=54327
trap 'stop_cluster "$dir" immediate; as_root rm -rf -- "$dir"' EXIT
new_cluster "$dir" $port "nemo.buffer_size = '2GB'" "shared_buffers = '1GB'" "max_wal_size = '8GB'" "autovacuum = off" \
	"synchronous_commit = off" "nemo.checkpoint_interval = 300"

sql() { as_pg psql -h "$dir" -p $port -U postgres -X -q -A -t -v ON_ERROR_STOP=1 -d "$1" -c "$2"; }
tps() {   # database, clients, pgbench arguments
	local db=$1 clients=$2
	shift 2
	as_pg pgbench -h "$dir" -p $port -U postgres -n -M prepared -c "$clients" -j "$clients" -T "$seconds" "$@" "$db" |
		sed -nE 's/^tps = ([0-9.]+).*/\1/p'
}
median() { sort -g | awk '{ v[NR] = $1 } END { print (NR % 2) ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }
# compare NAME COMMAND ARGUMENTS...: COMMAND heap ARGUMENTS and COMMAND nemo ARGUMENTS print a throughput each
compare() {
	local name=$1 run=$2 i h n
	shift 2
	: >"$dir/h"
	: >"$dir/n"
	: >"$dir/r"
	for i in $(seq "$rounds"); do
		# who comes first changes: what the one leaves behind is the other's burden
		if [ $((i % 2)) = 0 ]; then h=$($run heap "$@"); n=$($run nemo "$@"); else n=$($run nemo "$@"); h=$($run heap "$@"); fi
		echo "$h" >>"$dir/h"
		echo "$n" >>"$dir/n"
		awk -v a="$h" -v b="$n" 'BEGIN { print b / a }' >>"$dir/r"
	done
	printf '%-34s heap %10.0f  nemo %10.0f  nemo/heap %.2f\n' "$name" "$(median <"$dir/h")" "$(median <"$dir/n")" "$(median <"$dir/r")"
}

cat >"$dir/range.sql" <<'END'
\set a random(1, 100000 * :scale - 100)
SELECT sum(abalance) FROM pgbench_accounts WHERE aid BETWEEN :a AND :a + 99;
END
chmod 644 "$dir/range.sql"
for am in heap nemo; do
	sql postgres "CREATE DATABASE $am"
	sql $am "CREATE EXTENSION nemo"
	as_pg env PGOPTIONS="-c default_table_access_method=$am" pgbench -h "$dir" -p $port -U postgres -q -i -I dtp -s "$scale" $am 2>/dev/null
	# keys before rows, so that both load into tables that have them
	as_pg env PGOPTIONS="-c default_table_access_method=$am" pgbench -h "$dir" -p $port -U postgres -q -i -I gv -s "$scale" $am 2>/dev/null
	sql $am "SELECT sum(abalance) FROM pgbench_accounts" >/dev/null
done
for clients in 1 4; do
	compare "pgbench -S, $clients client(s), tps" tps $clients -S
	compare "TPC-B, $clients client(s), tps" tps $clients
	compare "100-row range, $clients client(s), tps" tps $clients -D scale="$scale" -f "$dir/range.sql"
done
timed() {  # database, statement: rows per second for a million rows
	local t0 t1
	t0=$(date +%s.%N)
	sql "$1" "$2" >/dev/null
	t1=$(date +%s.%N)
	awk -v a="$t0" -v b="$t1" 'BEGIN { printf "%.1f", 1000000 / (b - a) }'
}
load() {
	sql "$1" "DROP TABLE IF EXISTS m"
	sql "$1" "CREATE TABLE m (id bigint PRIMARY KEY, v text, n int) USING $1"
	sql "$1" "CHECKPOINT"
	timed "$1" "COPY m FROM '$dir/data/million.tsv'"
}
index() {
	sql "$1" "DROP INDEX IF EXISTS m_n"
	timed "$1" "CREATE INDEX m_n ON m (n)"
}
index_alone() {
	sql "$1" "DROP INDEX IF EXISTS m_n"
	timed "$1" "SET max_parallel_maintenance_workers = 0; CREATE INDEX m_n ON m (n)"
}
as_pg psql -h "$dir" -p $port -U postgres -X -q -d heap -c "COPY (SELECT g, 'name ' || g, g % 1000 FROM generate_series(1, 1000000) g) TO '$dir/data/million.tsv'"
rounds=$(((rounds + 1) / 2))
compare "COPY of 1 M rows, rows/s" load
compare "CREATE INDEX on 1 M rows, rows/s" index
compare "the same in one process" index_alone
sql nemo "SELECT nemo_checkpoint()" >/dev/null
echo "memory per settled record beyond key and value: $(sql nemo 'SELECT round(overhead_per_entry::numeric, 1) FROM nemo_stat_buffer') bytes"
