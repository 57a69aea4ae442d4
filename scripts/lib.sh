# lib.sh: what the scripts share: packages, build and install, and throw-away clusters.
# Source it from the top directory of the project.

PG_MAJOR=${PG_MAJOR:-15}
PG_BIN=/usr/lib/postgresql/$PG_MAJOR/bin
export PG_CONFIG=${PG_CONFIG:-$PG_BIN/pg_config}

if [ "$(id -u)" = 0 ]; then
	as_root() { "$@"; }
	# PostgreSQL refuses to run as root
	as_pg() { runuser -u postgres -- env PATH="$PG_BIN:$PATH" "$@"; }
	PG_OWNER=postgres
else
	as_root() { sudo "$@"; }
	as_pg() { env PATH="$PG_BIN:$PATH" "$@"; }
	PG_OWNER=$(id -un)
fi

# Install what is missing of the named Debian packages.
need_packages() {
	local missing=() p
	for p in "$@"; do
		[ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
	done
	[ ${#missing[@]} -eq 0 ] && return 0
	echo "installing: ${missing[*]}"
	as_root apt-get update -qq
	# postgresql-common would otherwise create and start a cluster of its own
	as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

build_and_install() {
	make -s -j2 PG_CONFIG="$PG_CONFIG"
	as_root make -s install PG_CONFIG="$PG_CONFIG" >/dev/null
}

# new_cluster DIR PORT [CONF-LINE ...]: initdb and start; the socket lies in DIR.
new_cluster() {
	local dir=$1 port=$2
	shift 2
	mkdir -p "$dir"
	as_root chown "$PG_OWNER" "$dir"
	as_pg initdb -D "$dir/data" -U postgres -A trust --locale=C -E UTF8 >/dev/null
	{
		echo "listen_addresses = ''"
		echo "unix_socket_directories = '$dir'"
		echo "port = $port"
		echo "shared_preload_libraries = 'nemo'"
		printf '%s\n' "$@"
	} | as_pg tee -a "$dir/data/postgresql.conf" >/dev/null
	as_pg pg_ctl -D "$dir/data" -l "$dir/log" -w -t 60 start >/dev/null
}

stop_cluster() {
	as_pg pg_ctl -D "$1/data" -m "${2:-fast}" -w -t 120 stop >/dev/null 2>&1 || true
}
