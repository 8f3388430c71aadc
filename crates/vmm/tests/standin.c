// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A stand-in for QEMU's plug-in loader: opens libebb_vmm.so as QEMU does (the
 * constructors run), refuses a qemu_plugin_version outside of MIN..CURRENT, and
 * installs it. With a size it then has "RAM": a mapping of descriptor 100 if that
 * is open, a file of its own if a word follows, else anonymous memory. It prints
 * the address, and the kernel writes each byte of the standard input to the
 * first page of it, as it does with what a device brings. What is exported to the
 * library is chosen when this is compiled (-DEXPORTS). Ends with its input.
 *
 *	standin LIBRARY SOCKET MIN CURRENT [SIZE [shared]]
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define E(name) void name(void); void name(void) {}
#if EXPORTS >= 1
E(qemu_plugin_n_vcpus)
#endif
#if EXPORTS >= 2
E(qemu_plugin_num_vcpus)
#endif
#if EXPORTS >= 4
E(qemu_plugin_read_memory_vaddr)
#endif
#if EXPORTS >= 5
E(qemu_plugin_write_register)
E(qemu_plugin_translate_vaddr)
#endif
/* 10.2.0: the function of version 6, still called 5. */
#ifdef DISCON
E(qemu_plugin_register_vcpu_discon_cb)
#endif
#if EXPORTS >= 6
E(qemu_plugin_set_pc)
#endif

struct info {
	const char *target_name;
	struct { int min, cur; } version;
	char system_emulation;
	struct { int smp_vcpus, max_vcpus; } system;
};

typedef int (*install_fn)(uint64_t, const struct info *, int, char **);

int main(int argc, char **argv)
{
	char option[256], *options[] = { option };
	struct info info = { "x86_64", { 0, 0 }, 1, { 1, 1 } };
	install_fn install;
	char byte;
	void *lib, *ram = &byte;
	int version;

	if (argc < 5)
		return 2;
	info.version.min = atoi(argv[3]);
	info.version.cur = atoi(argv[4]);
	lib = dlopen(argv[1], RTLD_LAZY | RTLD_LOCAL);
	if (!lib || !dlsym(lib, "qemu_plugin_version")) {
		fprintf(stderr, "%s\n", dlerror());
		return 2;
	}
	version = *(int *)dlsym(lib, "qemu_plugin_version");
	if (version < info.version.min || version > info.version.cur) {
		printf("refused %d\n", version);
		return 1;
	}
	install = (install_fn)dlsym(lib, "qemu_plugin_install");
	snprintf(option, sizeof(option), "socket=%s", argv[2]);
	if (!install || install(1, &info, 1, options))
		return 2;
	printf("loaded %d\n", version);
	if (argc > 5) {
		int file = fcntl(100, F_GETFD) < 0 ? -1 : 100;
		size_t size = strtoul(argv[5], NULL, 0);

		if (argc > 6 && ((file = memfd_create("ram", 0)) < 0 || ftruncate(file, size)))
			return 2;
		int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
		ram = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, file, 0);
		if (ram == MAP_FAILED)
			return 2;
		printf("ram %llu\n", (unsigned long long)(uintptr_t)ram);
	}
	fflush(stdout);
	while (read(0, ram, 1) > 0)
		;
	return 0;
}
