#!/usr/bin/env bash
# heap.sh [SECONDS] [SCALE]: nemo beside heap + btree in one run on one cluster, everything cached, prepared mode.
# Prints the ratio nemo/heap of throughput (higher is better for nemo) for each workload.
# Run with: bench/heap.sh 20 10
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
seconds=${1:-20}
scale=${2:-10}

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
ratio() { awk -v a="$2" -v b="$3" -v n="$1" 'BEGIN { printf "%-34s heap %12.1f  nemo %12.1f  nemo/heap %.2f\n", n, a, b, b / a }'; }

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
	for w in "pgbench -S:-S" "TPC-B:" "100-row range:-D scale=$scale -f $dir/range.sql"; do
		h=$(tps heap $clients ${w#*:})
		n=$(tps nemo $clients ${w#*:})
		ratio "${w%%:*}, $clients client(s), tps" "$h" "$n"
	done
done
timed() {  # database, statement: rows per second for a million rows
	local t0 t1
	t0=$(date +%s.%N)
	sql "$1" "$2" >/dev/null
	t1=$(date +%s.%N)
	awk -v a="$t0" -v b="$t1" 'BEGIN { printf "%.1f", 1000000 / (b - a) }'
}
as_pg psql -h "$dir" -p $port -U postgres -X -q -d heap -c "COPY (SELECT g, 'name ' || g, g % 1000 FROM generate_series(1, 1000000) g) TO '$dir/data/million.tsv'"
for am in heap nemo; do sql $am "CREATE TABLE m (id bigint PRIMARY KEY, v text, n int) USING $am"; done
h=$(timed heap "COPY m FROM '$dir/data/million.tsv'")
n=$(timed nemo "COPY m FROM '$dir/data/million.tsv'")
ratio "COPY of 1 M rows, rows/s" "$h" "$n"
h=$(timed heap "CREATE INDEX ON m (n)")
n=$(timed nemo "CREATE INDEX ON m (n)")
ratio "CREATE INDEX on 1 M rows, rows/s" "$h" "$n"
sql nemo "SELECT nemo_checkpoint()" >/dev/null
echo "memory per settled record beyond key and value: $(sql nemo 'SELECT round(overhead_per_entry::numeric, 1) FROM nemo_stat_buffer') bytes"
