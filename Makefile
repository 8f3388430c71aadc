# Ebb's commands. `make help` lists them.
#
# Targets install what they need, once: Debian packages through apt-get (they say
# which; sudo only if you are not root), guest kernels into the user's cache.

CARGO ?= cargo
# All of it at once: with fewer packages others' features, and a second build.
BUILD := $(CARGO) build --release --quiet
# Where what is installed and run is built.
BUILT ?= $(or $(CARGO_TARGET_DIR),target)/release
TARGET_DIR = --target-dir $(or $(CARGO_TARGET_DIR),target)
STATIC := x86_64-unknown-linux-gnu
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
SHARE = $(DESTDIR)/usr/share
COMPLETIONS := bash-completion/completions/ebb zsh/site-functions/_ebb fish/vendor_completions.d/ebb.fish
# VM tests share one machine. Those of a guest's life that take minutes are left to
# `make soak`, which runs them all, on both kernels.
SOAK_ONLY := vm_resets_during vm_resets_by_the_hundred vm_without_the_challenge vm_without_the_modules_notifiers \
  vm_without_the_tripwire vm_absent_pages vm_a_module_that_goes vm_a_daemon_killed_and_started \
  vm_memory_that_goes_offline vm_recycling_that_goes_on vm_a_guest_loaded vm_a_hibernated \
  vm_a_crash_kernel vm_pulses vm_two_thousand vm_an_idle_guest vm_kernels_that_cannot \
  vm_a_kernel_that_somebody vm_waits_beside vm_many_domains
# Several go at a time, as much of them is waiting; a test says by its arena beside whom it may
# (`Beside`). Those that need the machine to themselves go first: others would wait for them.
# Daemons judge by time: they are not beside those that load the machine. Those that set KSM go
# one by one, beside the daemons, and stand-ins and tier guest after them: most of their time is
# waiting.
WHOLE := vm_arena_is_restored vm_a_budget_makes
LOADS := lifecycle:: module:: recycle:: smoke::
KSM := merge:: ways_in:: vm_the_units_sandbox
DAEMONS := $(filter-out $(LOADS) $(KSM) standin:: tier::,$(patsubst crates/lab/tests/vm/%.rs,%::,\
  $(filter-out %/main.rs,$(wildcard crates/lab/tests/vm/*.rs))))
# Unit tests that judge by time.
TIMED := qmp::sharing linux::tests::discovery linux::tests::orders libvirt::worker
# The tests without a VM of their own.
ALONE := $(filter-out vm vm_%,$(notdir $(basename $(wildcard crates/*/tests/*.rs)) \
  $(patsubst %/main.rs,%,$(wildcard crates/*/tests/*/main.rs))))
# A test that hangs ends its lane with an error; the runner names each that takes over a minute.
BOUND := timeout --verbose --kill-after=60 30m
VM_TESTS = $(BOUND) $(CARGO) test --release --quiet --workspace --test vm -- --test-threads=$(1) $(2) \
  $(SOAK_ONLY:%=--skip %)

# A part of `make test`, and how long it took.
STEP = begun=$$(date +%s); $(MAKE) --no-print-directory $(1) && echo "make $(1): $$(($$(date +%s) - begun)) s"

# The steps of the handshake left out in turn: pages must be lost. Built apart, so
# that no agent that can lose pages comes near the real one; hardly optimized, as
# that compiles in less time.
FAULTS := env CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_DEBUG=false \
  $(CARGO) test --release --quiet -p ebb-vmm --features faults --target-dir target/faults \
  --test handshake --test kvm --test devices --test hash --test ksm

CHECKS := check-units check-guest check-build

.PHONY: help setup demo demo-bursts lint check $(CHECKS) check-alone test vm-build vm-loads vm-ksm vm-daemons soak bench \
  report fuzz install deb deb-test image clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

target/.setup: crates/lab/src/setup.rs crates/lab/src/image.rs $(wildcard guest/tool/*.[ch])
	@command -v cc >/dev/null || { echo "setup: installing gcc make"; \
	  $$( [ "$$(id -u)" = 0 ] || echo sudo ) apt-get install -y --no-install-recommends gcc libc6-dev make; }
	@$(BUILD)
	@$(CARGO) lab setup --headers
	@mkdir -p target && touch $@

setup: target/.setup ## install missing packages, fetch guest kernels, build images

demo: target/.setup ## how many VMs fit on 2 GiB: without Ebb, with free page reporting, with Ebb
	@$(BUILD)
	@$(CARGO) lab density --quick --json target/lab/density.json

demo-bursts: target/.setup ## three VMs on a host too small for them: without and with Ebb
	@$(BUILD)
	@$(CARGO) lab demo --json target/lab/demo.json

lint:
	@$(CARGO) fmt --all --check
	@$(CARGO) clippy --release --quiet --workspace --all-targets -- -D warnings
	@$(CARGO) lab tidy

check-guest:
	@$(MAKE) --no-print-directory -C guest test

check-units:
	@$(BOUND) $(CARGO) test --release --quiet --workspace --lib --bins -- $(TIMED:%=--skip %)

check-build:
	@$(CARGO) test --release --quiet --workspace $(ALONE:%=--test %) --no-run
	@$(FAULTS) --no-run

# Some judge by time: nothing is compiled beside them.
check-alone:
	@$(BOUND) $(CARGO) test --release --quiet --workspace --lib -- $(TIMED)
	@$(BOUND) $(CARGO) test --release --quiet --workspace $(ALONE:%=--test %)
	@$(BOUND) $(FAULTS) -- left_out tripwire picture without_ does_not_beat opened_is_seen discarded_twice

check: lint ## format, lint, house rules, tests without VMs
	@$(MAKE) --no-print-directory -j3 $(CHECKS)
	@$(MAKE) --no-print-directory check-alone

vm-build:
	@$(BUILD)
	@$(CARGO) test --release --quiet --workspace --test vm --test vm_qemu --no-run

test: target/.setup lint ## all of it, as CI: check, then the tests on real VMs
	@+$(call STEP,-j4 $(CHECKS) vm-build)
	@+$(call STEP,check-alone)
	@+$(call STEP,vm-loads)
	@+$(call STEP,-j2 vm-daemons vm-ksm)

vm-loads:
	@$(BOUND) $(CARGO) test --release --quiet --workspace --test vm_qemu
	@$(call VM_TESTS,1,$(WHOLE))
	@EBB_STRESS_SECONDS=$${EBB_STRESS_SECONDS:-6} $(call VM_TESTS,3,$(LOADS) $(WHOLE:%=--skip %))

vm-ksm:
	@$(call VM_TESTS,1,$(KSM))
	@$(call VM_TESTS,3,standin::)
	@$(call VM_TESTS,2,tier::)

vm-daemons:
	@$(call VM_TESTS,2,$(DAEMONS) --skip vm_the_units_sandbox)

soak: target/.setup ## hours: stress for ten minutes a kernel, a hundred resets, every hook left out
	@$(BUILD)
	@EBB_STRESS_SECONDS=600 EBB_RESETS=100 $(CARGO) test --release --workspace --test vm -- --test-threads=1 --nocapture \
	  module:: recycle:: lifecycle:: merge:: ebb:: standin::many libvirt::vm_many_domains
	@$(CARGO) test --release --quiet -p ebb-core --test growth -- --ignored

bench: ## what a tick costs and how Ebb compares with others, on synthetic guests
	@$(CARGO) bench --quiet -p ebb-core --bench tick
	@$(BUILD) $(TARGET_DIR)
	@$(BUILT)/ebb-sim --vms 200
	@$(BUILT)/ebb-sim --vms 1000 --seconds 120
	@$(BUILT)/ebb-sim --hosts 1000 --vms 10 --seconds 60
	@$(BUILT)/ebb-sim --compare --markdown docs/comparison.md --commit "$$(git describe --always --dirty)"

report: target/.setup ## most figures of README and docs/experiments.md measured again, into target/lab
	@$(BUILD)
	@$(CARGO) lab overhead --json target/lab/overhead.json
	@$(CARGO) lab density --quick --json target/lab/density.json
	@$(CARGO) lab demo --json target/lab/demo.json
	@$(CARGO) lab dedup --json target/lab/dedup.json
	@for e in scan corunner mark-cost recycle fragmented paused refault; do \
	  $(CARGO) lab $$e --kernel 6.1,6.12 --json target/lab/$$e.json || exit 1; done

fuzz: ## every fuzz target for a minute
	@cd fuzz && for t in $$(cargo fuzz list); do cargo fuzz run -s none $$t -- -max_total_time=60 || exit 1; done

install: ## binary, agent, units, manual, completions and documents below $(DESTDIR)/usr
	$(CARGO) build --release -p ebb -p ebb-vmm $(TARGET_DIR)
	install -D -m 0755 $(BUILT)/ebb $(DESTDIR)/usr/sbin/ebb
	install -D -m 0755 $(BUILT)/libebb_vmm.so $(DESTDIR)/usr/lib/ebb/libebb_vmm.so
	install -d $(SHARE)/doc/ebb/docs $(addprefix $(SHARE)/,$(dir $(COMPLETIONS)))
	install -D -m 0644 -t $(DESTDIR)/usr/lib/systemd/system packaging/*.service
	install -m 0644 -t $(SHARE)/doc/ebb README.md SECURITY.md CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md packaging/ebb.toml
	install -m 0644 -t $(SHARE)/doc/ebb/docs docs/*.md
	$(BUILT)/ebb man $(SHARE)/man
	gzip -9nf $(SHARE)/man/man5/ebb.toml.5 $(SHARE)/man/man8/ebb.8 $(SHARE)/man/man8/ebb-*.8	# as packages have them
	for s in bash zsh fish; do $(BUILT)/ebb completions $$s > \
	  $(SHARE)/$$(printf '%s\n' $(COMPLETIONS) | grep $$s) || exit 1; done

deb: target/.packager ## packages for Debian 12: ebb (host) and ebb-guest-dkms (guest), in target/deb
	@mkdir -p target/deb
	@rm -f target/deb/*.deb
	@DEB_RULES_REQUIRES_ROOT=no debian/rules binary
	@lintian --fail-on error target/deb/*.deb

deb-test: target/.setup deb ## the packages installed, upgraded, removed and purged in a clean Debian 12 (root)
	@debian/tests/clean-root lifecycle
	@debian/tests/clean-root libvirt
	@debian/tests/clean-root guest-dkms

PACKAGER := debhelper dh-dkms lintian debootstrap
target/.packager: Makefile
	@command -v dh_dkms >/dev/null && command -v lintian >/dev/null && command -v debootstrap >/dev/null || { \
	  echo "deb: installing $(PACKAGER)"; \
	  $$( [ "$$(id -u)" = 0 ] || echo sudo ) apt-get install -y --no-install-recommends $(PACKAGER); }
	@mkdir -p target && touch $@

# Static, as the image holds nothing else.
image: ## container image for Kubernetes, in target/image (buildah, as root)
	@command -v buildah >/dev/null || { echo "image: installing buildah"; \
	  apt-get install -y --no-install-recommends buildah; }
	@RUSTFLAGS='-C target-feature=+crt-static' $(CARGO) build --release --quiet -p ebb \
	  --target $(STATIC) --target-dir target/static
	@mkdir -p target/image && strip -o target/image/ebb target/static/$(STATIC)/release/ebb
	@buildah --storage-driver vfs build --isolation chroot --quiet --tag ebb:$(VERSION) \
	  --file packaging/kubernetes/Containerfile target/image
	@rm -f target/image/ebb-$(VERSION).tar
	@buildah --storage-driver vfs push --quiet ebb:$(VERSION) docker-archive:target/image/ebb-$(VERSION).tar:ebb:$(VERSION)
	@echo target/image/ebb-$(VERSION).tar

clean: ## build products; what an interrupted lab run left
	-@$(CARGO) lab clean
	$(CARGO) clean
