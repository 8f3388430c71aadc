#!/bin/sh
# Fills fuzz/corpus with what this machine's kernel and QEMU really say, so that
# the fuzzer starts from valid input. Needs nothing; may be run any time.
set -eu
cd "$(dirname "$0")"
for target in proc_text qemu_cmdline qmp_stream guest_stats guest_lines config replay guest_header guest_map \
	agent_requests agent_replies page_hashes libvirt_stream; do mkdir -p "corpus/$target"; done

# proc_text: the first byte chooses the parser (modulo 23).
put() { { printf "$1"; cat; } >"corpus/proc_text/$2"; }
put '\000' meminfo </proc/meminfo
put '\001' vmstat </proc/vmstat
echo 'some avg10=0.00 avg60=1.50 avg300=0.00 total=77' | put '\002' psi
printf 'Filename Type Size Used Priority\n/my\\040swap file 8 0 -2\n' | put '\003' swaps
printf '1 0x01 2\nname type data\nc_min 4 100\nsize 4 900\n' | put '\004' arcstats
put '\005' stat </proc/self/stat
put '\006' status </proc/self/status
echo 'Node 0 MemTotal: 2048 kB
Node 0 MemFree: 1024 kB' | put '\007' node
put '\010' mountinfo </proc/self/mountinfo
put '\011' cgroup-v1 </proc/self/cgroup
echo '0::/machine.slice/a:b' | put '\012' cgroup-v2
printf 'total_rss 1\ntotal_active_file 2\ntotal_dirty 1\n' | put '\013' stat-v1
printf 'anon 1\nactive_file 2\nfile_dirty 1\n' | put '\014' stat-v2
echo 9223372036854771712 | put '\015' limit
put '\022' credentials </proc/self/status
echo '4096000 1000000 1200000 0 1300000 5 0 0 0' | put '\023' mm_stat
put '\024' passwd </etc/passwd
printf '/vm/a\n/vm/b\n' | put '\025' paths

printf '%s\0' -name guest=a,,b,debug-threads=on -uuid 1 -chardev \
	socket,id=m,path=/x,server=on,wait=off -mon chardev=m,mode=control -device \
	'{"driver":"virtio-balloon-pci"}' -object memory-backend-memfd,hugetlb=on \
	-qmp unix:/y,server,nowait -incoming defer >corpus/qemu_cmdline/all
printf '%s\0' -machine q35,confidential-guest-support=s -object sev-guest,id=s \
	-overcommit mem-lock=on -realtime mlock=off >corpus/qemu_cmdline/pinned
printf '%s\0' -chardev socket,id=m,fd=29,server=on -mon m,mode=control >corpus/qemu_cmdline/fd

printf '\000\020{"return":1,"id"\020:1}{"event":"A"}' >corpus/qmp_stream/reply
printf '\001\200{"QMP":{}} {"return":{},"id":0}' >corpus/qmp_stream/greeting

cat >corpus/guest_stats/stats <<'JSON'
{"last-update": 5, "stats": {"stat-free-memory": 18446744073709551615, "stat-total-memory":
60000000, "stat-available-memory": 50000000, "stat-disk-caches": 7, "stat-swap-in": -1}}
JSON
echo '[{"name":"b0","type":"child<virtio-balloon-pci>"}]' >corpus/guest_stats/devices
echo '{"status":"running","actual":5,"base-memory":6}' >corpus/guest_stats/others

printf '{"id":1,"ok":true,"x":5}\n{"event":"ready","job":"a"}\n{"id":2,"ok":false,"error":"no"}\n' >corpus/guest_lines/all
cp ../packaging/ebb.toml corpus/config/example
printf '[vm.a]\nmin = "10%%"\nmax = "1GiB"\nweight = 2.5\n' >corpus/config/vm
printf '[host]\nusers = ["a", 7]\nsockets = "any"\n[vm."uuid:11111111-2222-3333-4444-555555555555"]\nmin = 1\n' >corpus/config/host

# guest_header: flags, then a header (mended by the target) with extents at 0x11000.
{ printf '\000'; head -c 72 /dev/zero; printf '\000\200\000\000\000\000\000\000'; head -c 176 /dev/zero
printf '\002\000\000\000\000\000\000\000\000\020\001\000\000\000\000\000\001\000\000\000'; head -c 500 /dev/zero
printf '\000\000\000\000\000\000\000\000\001\000\000\000\000\000\000\000\000\040\001\000\000\000\000\000'
printf '\000\000\000\000\001\000\000\000'; head -c 224 /dev/zero; } >corpus/guest_header/one
# guest_map: beats, challenge, beats, recycle, marks, facts.
printf '\000\000\000\000\000\000\005\000\000\007\006\011\005\011\001' >corpus/guest_map/recycle
printf '\000\000\000\000\000\003\002\003\007\005\011\000\004\010\000\003\001\005\000\000' >corpus/guest_map/extents
printf '%s\n' '{"id":1,"command":"hello"}' '{"id":2,"command":"attach","segments":[{"gpa":0,"size":4096,"hva":7}]}' \
	'{"id":3,"command":"recycle","budget_ms":7}' '{"id":4,"command":"status","held":true}' \
	'{"id":5,"command":"mark"}' '{"id":6,"command":"facts"}' '{"id":8,"command":"advise","open":[[4096,8192]]}' \
	'{"id":7,"command":"stand_down"}' >corpus/agent_requests/all
{ printf '\100%s\n' '{"id":1,"ok":{"answer":"status","state":"ready","free":8192,"why":"x"}}'
printf '\100%s\n' '{"id":2,"error":{"kind":"aside","text":"vfio"}}'; } >corpus/agent_replies/both

# page_hashes: a question about one page, and an answer to one.
{ printf 'EbH1\001\0\0\0'; head -c 192 /dev/zero; printf '\0\020\0\0\0\0\0\0\0\020\0\0\0\0\0\0'; } >corpus/page_hashes/question
{ printf 'EbH1\001\0\0\0\001'; head -c 23 /dev/zero; printf '\001'; head -c 23 /dev/zero; } >corpus/page_hashes/answer

# libvirt_stream: an answer to the first call, and an event.
{ printf '\0\0\0\034\040\0\200\206\0\0\0\001\0\0\0\001\0\0\0\001\0\0\0\001\0\0\0\0'
printf '\0\0\0\034\040\0\200\206\0\0\0\001\0\0\001\077\0\0\0\002\0\0\0\0\0\0\0\0'; } >corpus/libvirt_stream/both

# libvirt_stream: a domain's metadata.
printf "<ebb:memory xmlns:ebb='urn:ebb:domain:1' min='1GiB' manage='yes'/>" >corpus/libvirt_stream/metadata
