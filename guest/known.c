// SPDX-License-Identifier: GPL-2.0
/*
 * Whose build a kernel is, by what it says of itself (uname -r and uname -v).
 *
 * A vendor's kernel may carry the number of a series and the page allocator of
 * another one, so numbers alone say little.  Two kinds are known:
 *
 *   Debian	6.1.0-56-cloud-amd64, "#1 SMP … Debian 6.1.192-2 (date)"
 *   plain	6.12.30, "#7 SMP … Mon Nov 23 …": kernel.org's sources; whoever
 *		changes them and says so by a suffix is unknown
 *
 * This file builds in user space as well (make test).
 */
#ifdef __KERNEL__
#include <linux/string.h>
#include <linux/types.h>
#else
#include <string.h>
#endif
#include "known.h"

static const char *skip_digits(const char *s)
{
	while (*s >= '0' && *s <= '9')
		s++;
	return s;
}

/* What follows "6.12.30": NULL if the text does not begin like that. */
static const char *after_number(const char *s)
{
	unsigned int i;

	for (i = 0; i < 3; i++) {
		const char *end = skip_digits(s);

		if (end == s || (i < 2 && *end != '.'))
			return NULL;
		s = i < 2 ? end + 1 : end;
	}
	return s;
}

/* "6.12." of both. */
static bool same_series(const char *a, const char *b)
{
	unsigned int dots = 0;

	for (; *a == *b && *a; a++, b++) {
		dots += *a == '.';
		if (dots == 2)
			return true;
	}
	return false;
}

static bool debian(const char *release, const char *version)
{
	static const char mark[] = " Debian ", arch[] = "-amd64";
	const char *at = strstr(version, mark), *end, *rest;
	size_t len = strlen(release);

	if (!at || len < sizeof(arch) || strcmp(release + len - (sizeof(arch) - 1), arch))
		return false;
	at += sizeof(mark) - 1;
	rest = after_number(at);
	if (!rest || *rest != '-' || !same_series(release, at))
		return false;
	end = skip_digits(rest + 1);
	if (end == rest + 1)
		return false;
	/* Stable updates and backports are Debian's, other suffixes others'. */
	if (!strncmp(end, "~deb", 4) || !strncmp(end, "+deb", 4) || !strncmp(end, "~bpo", 4))
		return true;
	return !strncmp(end, " (", 2);
}

static bool word(const char **s, const char *word)
{
	size_t len = strlen(word);

	if (strncmp(*s, word, len) || (*s)[len] != ' ')
		return false;
	*s += len + 1;
	return true;
}

static bool plain(const char *release, const char *version)
{
	static const char *const days[] = { "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun" };
	const char *rest = after_number(release);
	unsigned int i;

	if (!rest || *rest)
		return false;
	if (*version != '#' || skip_digits(version + 1) == version + 1)
		return false;
	version = skip_digits(version + 1);
	if (*version++ != ' ')
		return false;
	while (word(&version, "SMP") || word(&version, "PREEMPT") ||
	       word(&version, "PREEMPT_DYNAMIC"))
		;
	for (i = 0; i < sizeof(days) / sizeof(*days); i++)
		if (word(&version, days[i]))
			return true;
	return false;
}

bool ebb_build_known(const char *release, const char *version)
{
	return debian(release, version) || plain(release, version);
}
