// SPDX-License-Identifier: GPL-2.0
/* Whose build a kernel is: what real ones say of themselves, and near misses. */
#include <stdio.h>

#include "../known.h"

#define DEBIAN "#1 SMP PREEMPT_DYNAMIC Debian "
#define DATE "Mon Nov 23 05:04:10 UTC 2026"

static const struct {
	bool known;
	const char *release, *version;
} builds[] = {
	{ true, "6.1.0-56-cloud-amd64", DEBIAN "6.1.192-2 (2026-11-16)" },
	{ true, "6.1.0-13-amd64", DEBIAN "6.1.55-1 (2023-09-29)" },
	{ true, "6.12.117+deb12-cloud-amd64", DEBIAN "6.12.117-1~deb12u1 (2026-11-14)" },
	{ true, "6.12.9+bpo-amd64", DEBIAN "6.12.9-1~bpo12+1 (2025-01-19)" },
	{ true, "6.12.48+deb13-amd64", DEBIAN "6.12.48-1 (2025-09-20)" },
	{ true, "6.12.30", "#7 SMP PREEMPT_DYNAMIC " DATE },
	{ true, "6.1.100", "#1 SMP " DATE },
	/* Another series below Debian's name, other architectures, own builds. */
	{ false, "6.1.0-13-amd64", DEBIAN "6.12.48-1 (2025-09-20)" },
	{ false, "6.12.48+deb13-amd64", DEBIAN "6.1.55-1 (2023-09-29)" },
	{ false, "6.12.48+deb13-arm64", DEBIAN "6.12.48-1 (2025-09-20)" },
	{ false, "6.12.48-mine", DEBIAN "6.12.48-1 (2025-09-20)" },
	{ false, "6.12.12-amd64", DEBIAN "6.12.12-1parrot1 (2025-01-19)" },
	{ false, "6.12.12-amd64", DEBIAN "6.12.12 (2025-01-19)" },
	{ false, "6.12.12-amd64", DEBIAN "6.12.12-" },
	{ false, "6.12.12-amd64", DEBIAN },
	{ false, "-amd64", DEBIAN "6.12.12-1 (2025-01-19)" },
	{ false, "6.12.13-amd64", "#1 SMP PREEMPT_DYNAMIC Kali 6.12.13-1kali1 (2025-02-11)" },
	{ false, "6.12.0-55.el10.x86_64", "#1 SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.0-100.28.2.el9uek.x86_64", "#1 SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.0-160000.5-default", "#1 SMP PREEMPT_DYNAMIC " DATE " (1234567)" },
	{ false, "6.1.141-155.222.amzn2023.x86_64", "#1 SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.1.75-android14-11-gabcdef", "#1 SMP PREEMPT " DATE },
	{ false, "6.12.10-1-lts", "#1 SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.10+", "#1 SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.0-rc3", "#1 SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.10", "#1-NixOS SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.10", "#52-Ubuntu SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.10", "#1 SMP PREEMPT_DYNAMIC PMX 6.12.10-1 (2025-01-19)" },
	{ false, "6.12", "#1 SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.", "#1 SMP PREEMPT_DYNAMIC " DATE },
	{ false, "6.12.10", "# SMP " DATE },
	{ false, "6.12.10", "#1" },
	{ false, "6.12.10", "" },
	{ false, "", "" },
};

int main(void)
{
	unsigned int i, wrong = 0;

	for (i = 0; i < sizeof(builds) / sizeof(*builds); i++) {
		if (ebb_build_known(builds[i].release, builds[i].version) == builds[i].known)
			continue;
		printf("%s | %s: should be %s\n", builds[i].release, builds[i].version,
		       builds[i].known ? "known" : "unknown");
		wrong++;
	}
	printf("known_test: %u builds, %u wrong\n", i, wrong);
	return wrong != 0;
}
